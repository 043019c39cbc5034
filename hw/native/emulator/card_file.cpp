#include "card_file.hpp"

#include <algorithm>
#include <fstream>
#include <numeric>
#include <set>
#include <sstream>

namespace emulator {
namespace {

constexpr int kFileMissing = 10, kFileDamaged = 12;

// One line of a file, word by word; what is wrong names file and line.
class Line {
 public:
  Line(const std::string& path, int number, const std::string& text)
      : where_(path + ":" + std::to_string(number)), words_(text) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw FileError(kFileDamaged, where_ + ": " + what);
  }
  bool more() { return !(words_ >> std::ws).eof(); }
  std::string word() {
    std::string text;
    if (!(words_ >> text)) fail("the line ends too early");
    return text;
  }
  std::int64_t number(std::int64_t least, std::int64_t most) { return parse(word(), least, most); }
  std::int64_t parse(const std::string& text, std::int64_t least, std::int64_t most) const {
    std::size_t used = 0;
    std::int64_t value = 0;
    try {
      value = std::stoll(text, &used);
    } catch (const std::exception&) {
      used = 0;
    }
    if (used != text.size() || text.empty() || value < least || value > most)
      fail("'" + text + "' is not a whole number of " + std::to_string(least) + " to " +
           std::to_string(most));
    return value;
  }
  template <typename T>
  T one_of(const std::vector<std::pair<const char*, T>>& choices) {
    const std::string text = word();
    for (const auto& [name, value] : choices)
      if (text == name) return value;
    fail("'" + text + "' is not a value of this key");
  }
  void end() {
    if (more()) fail("'" + word() + "' is too much");
  }

 private:
  std::string where_;
  std::istringstream words_;
};

template <typename Take>
void each_line(const std::string& path, Take take) {
  std::ifstream file(path);
  if (!file) throw FileError(kFileMissing, path + ": cannot be opened");
  std::string text;
  for (int number = 1; std::getline(file, text); ++number) {
    Line line(path, number, text.substr(0, text.find('#')));
    if (!line.more()) continue;
    const std::string key = line.word();
    take(key, line);
    line.end();
  }
}

constexpr std::int64_t kMostNs = std::int64_t{1} << 60;

const std::vector<std::pair<const char*, Stage>> kStageNames{{"submit", kSubmit},
                                                             {"h2d", kH2d},
                                                             {"compute", kCompute},
                                                             {"d2h", kD2h},
                                                             {"interrupt", kInterrupt}};

const std::set<std::string> kPoints{"csr",       "map",  "slice", "configure", "reset",
                                    "infer",     "wait", "exception", "nan",   "hang",
                                    "hang_infer", "hang_for_ever", "throw", "kv"};

FaultLine fault(Line& line) {
  FaultLine made;
  made.point = line.word();
  if (!kPoints.count(made.point)) line.fail("'" + made.point + "' is no point of a fault");
  while (line.more()) {
    const std::string word = line.word();
    const std::size_t equals = word.find('=');
    if (equals == std::string::npos) line.fail("'" + word + "' is not KEY=NUMBER");
    const std::string key = word.substr(0, equals);
    const std::int64_t value = line.parse(word.substr(equals + 1), 0, kMostNs);
    if (key == "code") made.code = static_cast<int>(value);
    else if (key == "at") made.at = value;
    else if (key == "every") made.every = value;
    else if (key == "times") made.times = value;
    else line.fail("'" + key + "' is no key of a fault");
  }
  return made;
}

void check_graph(const Graph& graph, const std::string& path) {
  const auto has = [&](const std::string& name) { return !name.empty(); };
  if (!has(graph.tokens) || !has(graph.position) || !has(graph.logits) || !has(graph.csr_cur) ||
      !has(graph.csr_total))
    throw FileError(kFileDamaged, path + ": graph '" + graph.info.name +
                                      "' needs tensors tokens, position, logits and two CSRs");
}

}  // namespace

const Graph* CalbinFile::find(const std::string& name) const {
  for (const Graph& graph : graphs)
    if (graph.info.name == name) return &graph;
  return nullptr;
}

CalbinFile read_calbin(const std::string& path) {
  CalbinFile made;
  bool headed = false;
  each_line(path, [&](const std::string& key, Line& line) {
    if (!headed) {
      if (key != "calbin" || line.number(1, 1) != 1) line.fail("this is no emulated calbin");
      headed = true;
      return;
    }
    if (key == "graph") {
      made.graphs.emplace_back();
      made.graphs.back().info.name = line.word();
      made.graphs.back().kind = line.word();
      return;
    }
    if (made.graphs.empty()) line.fail("'" + key + "' comes before any graph");
    Graph& graph = made.graphs.back();
    if (key == "tensor") {
      const auto role = line.one_of<std::string Graph::*>(
          {{"tokens", &Graph::tokens}, {"position", &Graph::position}, {"logits", &Graph::logits}});
      calrt::TensorInfo tensor;
      if (!(graph.*role).empty()) line.fail("the graph has that tensor already");
      tensor.name = graph.*role = line.word();
      for (const calrt::TensorInfo& other : graph.info.tensors)
        if (other.name == tensor.name) line.fail("two tensors are named '" + tensor.name + "'");
      tensor.dtype = line.one_of<calrt::PrimitiveType>({{"s32", calrt::PrimitiveType::S32},
                                                        {"bf16", calrt::PrimitiveType::BF16},
                                                        {"f32", calrt::PrimitiveType::F32}});
      tensor.byte_size = tensor.dtype == calrt::PrimitiveType::BF16 ? 2 : 4;
      while (line.more()) {
        tensor.shape.push_back(static_cast<std::uint64_t>(line.number(1, 1 << 30)));
        tensor.byte_size *= tensor.shape.back();
        if (tensor.byte_size > (std::uint64_t{1} << 32)) line.fail("the tensor is too large");
      }
      if (tensor.shape.empty()) line.fail("the tensor has no shape");
      graph.info.tensors.push_back(tensor);
    } else if (key == "csr") {
      const auto which = line.one_of<std::string Graph::*>(
          {{"cur", &Graph::csr_cur}, {"total", &Graph::csr_total}});
      if (!(graph.*which).empty()) line.fail("the graph has that CSR already");
      graph.*which = line.word();
    } else if (key == "meta") {
      const std::string name = line.word(), value = line.word();
      for (const auto& other : graph.info.metadata)
        if (other.first == name) line.fail("the graph has '" + name + "' already");
      graph.info.metadata.emplace_back(name, value);
      if (name == "logits_tile_d0") graph.tile_d0 = static_cast<int>(line.parse(value, 1, 1 << 24));
    } else {
      line.fail("'" + key + "' is no key of a calbin");
    }
  });
  if (made.graphs.empty()) throw FileError(kFileDamaged, path + ": holds no graph");
  for (const Graph& graph : made.graphs) {
    check_graph(graph, path);
    made.models.push_back(graph.info);
  }
  return made;
}

CardFile read_card(const std::string& path) {
  CardFile card;
  bool headed = false;
  std::set<std::string> seen;
  const auto permille = [](Line& line) {
    std::vector<int> parts;
    while (line.more()) parts.push_back(static_cast<int>(line.number(1, 1000)));
    if (parts.empty() || parts.size() > calrt::kMostDies) line.fail("give 1 to 8 numbers");
    return parts;
  };
  each_line(path, [&](const std::string& key, Line& line) {
    if (!headed) {
      if (key != "card" || line.number(1, 1) != 1) line.fail("this is no card file");
      headed = true;
      return;
    }
    if (key != "compute" && key != "fault" && !seen.insert(key).second)
      line.fail("'" + key + "' is there already");
    if (key == "engines") {
      card.engines = static_cast<int>(line.number(1, 64));
    } else if (key == "overlap") {
      card.overlap = line.number(0, 1) != 0;
    } else if (key == "dma") {
      card.full_duplex = line.one_of<bool>({{"half_duplex", false}, {"full_duplex", true}});
    } else if (key == "dma_order") {
      card.dma_order =
          line.one_of<DmaOrder>({{"ready", DmaOrder::Ready}, {"issue", DmaOrder::Issue}});
    } else if (key == "compute_stages") {
      card.compute_stages = permille(line);
      if (std::accumulate(card.compute_stages.begin(), card.compute_stages.end(), 0) != 1000)
        line.fail("the parts do not sum to 1000");
    } else if (key == "compute_sharing") {
      card.compute_sharing = permille(line);
    } else if (key == "slot_release") {
      card.slot_release = line.one_of<SlotRelease>({{"h2d", SlotRelease::H2d},
                                                    {"compute", SlotRelease::Compute},
                                                    {"d2h", SlotRelease::D2h},
                                                    {"wait", SlotRelease::Wait}});
    } else if (key == "completion_signal") {
      card.completion_signal = line.one_of<Signal>(
          {{"per_job", Signal::PerJob}, {"compute_idle", Signal::ComputeIdle}});
    } else if (key == "completion_order") {
      card.completion_order =
          line.one_of<WaitOrder>({{"in_order", WaitOrder::InOrder}, {"any", WaitOrder::Any}});
    } else if (key == "submit_when_full") {
      card.submit_when_full =
          line.one_of<WhenFull>({{"block", WhenFull::Block}, {"busy", WhenFull::Busy}});
    } else if (key == "kv_after_failed_wait") {
      card.kv_after_failed_wait = line.one_of<KvAfter>({{"unchanged", KvAfter::Unchanged},
                                                        {"applied", KvAfter::Applied},
                                                        {"unknown", KvAfter::Unknown}});
    } else if (key == "reset_scope") {
      card.reset_scope = line.one_of<ResetScope>({{"none", ResetScope::None},
                                                  {"job", ResetScope::Job},
                                                  {"engine", ResetScope::Engine},
                                                  {"device", ResetScope::Device}});
    } else if (key == "submit_ns") {
      card.submit_ns = line.number(0, kMostNs);
    } else if (key == "interrupt_ns") {
      card.interrupt_ns = line.number(0, kMostNs);
    } else if (key == "reset_ns") {
      card.reset_ns = line.number(0, kMostNs);
    } else if (key == "h2d") {
      card.h2d_latency_ns = line.number(0, kMostNs);
      card.h2d_bytes_per_s = line.number(1, kMostNs);
    } else if (key == "d2h") {
      card.d2h_latency_ns = line.number(0, kMostNs);
      card.d2h_bytes_per_s = line.number(1, kMostNs);
    } else if (key == "compute") {
      const std::string kind = line.word();
      if (card.compute.count(kind)) line.fail("compute of '" + kind + "' is there already");
      CardFile::Compute& compute = card.compute[kind];
      compute.base_ns = line.number(0, kMostNs);
      compute.per_token_ps = line.number(0, kMostNs);
      compute.per_pair_ps = line.number(0, kMostNs);
    } else if (key == "jitter") {
      card.jitter = line.one_of<Jitter>({{"none", Jitter::None},
                                         {"uniform", Jitter::Uniform},
                                         {"exponential", Jitter::Exponential},
                                         {"lognormal", Jitter::Lognormal}});
      card.jitter_cv_ppm = line.number(0, 10'000'000);
      card.jitter_seed = static_cast<std::uint64_t>(line.number(0, INT64_MAX));
      while (line.more()) card.jittered[line.one_of<Stage>(kStageNames)] = true;
    } else if (key == "kv_tokens") {
      card.kv_tokens = line.number(0, kMostNs);
    } else if (key == "report_stages") {
      card.report_stages = line.number(0, 1) != 0;
    } else if (key == "compute_tokens") {
      card.compute_tokens = line.number(0, 1) != 0;
    } else if (key == "fault") {
      card.faults.push_back(fault(line));
    } else {
      line.fail("'" + key + "' is no key of a card file");
    }
  });
  if (!headed) throw FileError(kFileDamaged, path + ": is empty");
  return card;
}

}  // namespace emulator

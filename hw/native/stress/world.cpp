#include "world.hpp"

#include <algorithm>
#include <fstream>
#include <sstream>

#include "watch.hpp"

namespace stress {
namespace {

constexpr std::int64_t kMostNs = 200'000;  // of a stage

std::int64_t stage_ns(Random& random) {
  if (random.percent(25)) return 0;
  return random.between(0, random.percent(50) ? kMostNs / 8 : kMostNs);
}

Fault fault(Random& random, const std::string& point) {
  Fault made;
  made.point = point;
  made.times = random.between(1, 3);
  if (random.percent(50)) {
    made.at = random.between(0, 15);
  } else if (random.percent(60)) {
    made.every = random.between(2, 7);
  }
  if (point == "infer") made.code = random.one_of({0, 3, 17, 21});
  if (point == "wait") made.code = random.one_of({0, 13, 26});
  if (point == "configure" || point == "reset") made.code = random.one_of({0, 19, 25});
  if (point == "csr" || point == "map" || point == "slice") made.code = random.one_of({0, 5, 24});
  return made;
}

std::string shape_of(std::int64_t first, std::int64_t second) {
  return " 1 " + std::to_string(first) + (second > 0 ? " " + std::to_string(second) : "");
}

}  // namespace

World::World(Random& random, End end) : end(end) {
  vocab = random.one_of<std::int64_t>({32, 64, 128});
  tile = random.one_of<std::int64_t>({16, 32, vocab});
  longest = random.between(12, 48);
  const std::int64_t prefill = random.between(4, 12);
  if (random.percent(50)) {
    graphs = {{"prefill", "ids", "at", "logits", prefill, random.percent(50) ? prefill : 1},
              {"decode", "ids", "at", "logits", 1, 1}};
  } else {
    graphs = {{"first", "first_ids", "first_at", "first_out", prefill, prefill},
              {"next", "next_ids", "next_at", "next_out", 1, 1}};
  }

  engines = static_cast<int>(random.between(1, 3));
  overlap = random.percent(70);
  full_duplex = random.percent(70);
  issue_order = random.percent(30);
  compute_idle = random.percent(30);
  any_order = random.percent(30);
  blocks = random.percent(50);
  reports = random.percent(80);
  tokens = random.percent(90);
  compute_stages = random.one_of<std::vector<int>>({{1000}, {500, 500}, {200, 300, 500}});
  compute_sharing = random.one_of<std::vector<int>>({{1000}, {1000, 600}, {1000, 700, 500}});
  slot_release = random.one_of<std::string>({"h2d", "compute", "d2h", "wait"});
  kv_after = random.one_of<std::string>({"unchanged", "applied", "unknown"});
  reset_scope = random.one_of<std::string>({"none", "job", "engine", "device", "device"});
  if (end == End::Hang || (end == End::ResetFlying && random.percent(80))) reset_scope = "device";

  submit_ns = stage_ns(random);
  interrupt_ns = stage_ns(random) / 4;
  reset_ns = stage_ns(random) * 10;
  h2d_ns = stage_ns(random);
  d2h_ns = stage_ns(random);
  compute_ns = stage_ns(random);
  per_token_ps = random.between(0, 5'000'000);
  h2d_bytes_per_s = random.one_of<std::int64_t>({10'000'000, 1'000'000'000, 1'000'000'000'000});
  d2h_bytes_per_s = random.one_of<std::int64_t>({100'000'000, 1'000'000'000, 1'000'000'000'000});
  kv_tokens = random.percent(50) ? 0 : random.between(longest, 4 * longest);
  if (random.percent(25))
    jitter = random.one_of<std::string>({"uniform 200000", "exponential 1000000", "lognormal 300000"}) +
             " " + std::to_string(random.between(0, 1'000'000)) + " submit h2d compute d2h interrupt";

  if (random.percent(50))
    for (std::int64_t count = random.between(1, 4); count > 0; --count)
      faults.push_back(
          fault(random, random.one_of<std::string>({"infer", "wait", "exception", "nan", "throw", "csr",
                                                    "map", "slice", "configure", "reset", "kv"})));
  const bool may_hang = reset_scope == "device" && random.percent(10);
  if (end == End::Hang || may_hang) {
    faults.push_back(fault(random, random.percent(75) ? "hang" : "hang_infer"));
    faults.back().times = random.between(1, 2);
  }
}

std::string World::calbin_text() const {
  std::ostringstream text;
  text << "calbin 1\n";
  for (const Graph& graph : graphs)
    text << "graph " << graph.name << " " << graph.name << "\n"
         << "tensor tokens " << graph.tokens << " s32" << shape_of(graph.positions, 0) << "\n"
         << "tensor position " << graph.position << " s32" << shape_of(graph.positions, 0) << "\n"
         << "tensor logits " << graph.logits << " bf16" << shape_of(graph.rows, vocab) << "\n"
         << "csr cur " << graph.name << "_cur\n"
         << "csr total " << graph.name << "_total\n"
         << "meta logits_tile_d0 " << tile << "\n";
  return text.str();
}

std::string World::card_text() const {
  std::ostringstream text;
  const auto list = [&](const char* key, const std::vector<int>& parts) {
    text << key;
    for (int part : parts) text << " " << part;
    text << "\n";
  };
  text << "card 1\nengines " << engines << "\noverlap " << overlap << "\ndma "
       << (full_duplex ? "full_duplex" : "half_duplex") << "\ndma_order "
       << (issue_order ? "issue" : "ready") << "\n";
  list("compute_stages", compute_stages);
  list("compute_sharing", compute_sharing);
  text << "slot_release " << slot_release << "\ncompletion_signal "
       << (compute_idle ? "compute_idle" : "per_job") << "\ncompletion_order "
       << (any_order ? "any" : "in_order") << "\nsubmit_when_full " << (blocks ? "block" : "busy")
       << "\nkv_after_failed_wait " << kv_after << "\nreset_scope " << reset_scope << "\nsubmit_ns "
       << submit_ns << "\ninterrupt_ns " << interrupt_ns << "\nh2d " << h2d_ns << " " << h2d_bytes_per_s
       << "\nd2h " << d2h_ns << " " << d2h_bytes_per_s << "\n";
  for (const Graph& graph : graphs)
    text << "compute " << graph.name << " " << compute_ns << " " << per_token_ps << " 0\n";
  if (!jitter.empty()) text << "jitter " << jitter << "\n";
  text << "kv_tokens " << kv_tokens << "\ncompute_tokens " << tokens << "\nreport_stages " << reports
       << "\nreset_ns " << reset_ns << "\n";
  for (const Fault& each : faults) {
    text << "fault " << each.point;
    if (each.code != 0) text << " code=" << each.code;
    if (each.at >= 0) text << " at=" << each.at;
    if (each.every > 0) text << " every=" << each.every;
    text << " times=" << each.times << "\n";
  }
  return text.str();
}

void World::write(const std::string& calbin) const {
  const auto put = [](const std::string& path, const std::string& text) {
    std::ofstream file(path);
    file << text;
    if (!file.flush()) fail("cannot write " + path);
  };
  put(calbin, calbin_text());
  put(calbin + ".card", card_text());
}

bool World::has(const std::string& point) const { return most(point) > 0; }

std::int64_t World::most(const std::string& point) const {
  std::int64_t sum = 0;
  for (const Fault& each : faults)
    if (each.point == point) sum += each.times;
  return sum;
}

int World::strike(const std::string& point, int usual_code) {
  const std::int64_t call = calls_[point]++;
  for (Fault& each : faults) {
    if (each.point != point || each.struck == each.times) continue;
    if (each.every > 0 ? (call + 1) % each.every != 0 : each.at >= 0 && each.at != call) continue;
    ++each.struck;
    return each.code != 0 ? each.code : usual_code;
  }
  return -1;
}

}  // namespace stress

// The CalRT surface on the emulated card.
#include "calrt/calrt.hpp"

#include <cstdio>

#include "card.hpp"

namespace calrt {
namespace {

constexpr CalrtCode kIllegalValue = 4, kOutOfRange = 14, kNotConfigured = 16, kMapBroken = 24,
                    kWrongDirection = 29;

}  // namespace

namespace detail {

struct Calbin {
  CalrtCode code = CalrtSuccess;
  emulator::CalbinFile file;
  emulator::CardFile card;
};

struct Card : emulator::Card {};

struct Input {
  std::shared_ptr<Card> card;
  std::string model;
  std::vector<TensorInfo> tensors;
  std::map<std::string, emulator::Mapped> mapped;
  std::string logits;
  KvSeqId sequence = 0;
};

struct Output {
  std::shared_ptr<Card> card;
  std::string model;
  std::vector<TensorInfo> tensors;
  emulator::Mapped mapped;
  emulator::JobPtr job;
  BufStatus status = BufStatus::PENDING;
  bool reports = true;
};

}  // namespace detail

Calbin::Calbin(const std::string& path) : impl(std::make_shared<detail::Calbin>()) {
  try {
    impl->file = emulator::read_calbin(path);
    impl->card = emulator::read_card(path + ".card");
  } catch (const emulator::FileError& error) {
    impl->code = error.code;
    impl->file.models.clear();
    // A runtime logs what it thinks of a file; so does this one.
    std::fprintf(stderr, "calrt emulator: %s\n", error.what());
  }
}

CalrtCode Calbin::code() const { return impl->code; }

const std::vector<ModelInfo>& Calbin::GetAllModels() const { return impl->file.models; }

bool KvManager::canAllocate(std::uint32_t sequences) const { return card->can_allocate(sequences); }

bool KvManager::Apply(KvSeqId sequence, std::uint32_t target_tokens) {
  return card->apply(sequence, target_tokens);
}

void KvManager::Release(KvSeqId sequence) { card->release(sequence); }

VirtualDevice::VirtualDevice() : impl(std::make_shared<detail::Card>()) {}
VirtualDevice::~VirtualDevice() = default;

CalrtCode VirtualDevice::Configure(const Calbin& calbin) {
  if (calbin.code() != CalrtSuccess) return calbin.code();
  return impl->configure(calbin.impl->file, calbin.impl->card);
}

KvManager VirtualDevice::GetKvManager() { return KvManager{impl}; }

CalrtCode VirtualDevice::EnableParallelMode(bool on) { return impl->enable_parallel(on); }

CalrtCode VirtualDevice::SetCsrByName(const std::string& model, const std::string& name,
                                      std::uint32_t value) {
  return impl->set_csr(model, name, value);
}

CalrtCode VirtualDevice::ResetCCU() { return impl->reset(emulator::ResetScope::Job); }
CalrtCode VirtualDevice::ResetConfiguration() { return impl->reset(emulator::ResetScope::Device); }
CalrtCode VirtualDevice::Reset() { return impl->reset(emulator::ResetScope::Device); }

namespace {

std::shared_ptr<detail::Input> make_input(const std::shared_ptr<detail::Card>& card,
                                          const std::string& model) {
  auto made = std::make_shared<detail::Input>();
  made->card = card;
  made->model = model;
  return made;
}

const TensorInfo* find(const std::vector<TensorInfo>& tensors, const std::string& name) {
  for (const TensorInfo& tensor : tensors)
    if (tensor.name == name) return &tensor;
  return nullptr;
}

}  // namespace

CalrtInputBuf::CalrtInputBuf(VirtualDevice* device, const std::string& model)
    : impl(make_input(device->impl, model)) {
  const emulator::Graph graph = device->impl->graph(model);
  impl->tensors = graph.info.tensors;
  impl->logits = graph.logits;
  for (const TensorInfo& tensor : impl->tensors)
    if (tensor.name != graph.logits) impl->mapped[tensor.name].info = tensor;
}

CalrtCode CalrtInputBuf::MapBuf(const std::string& tensor, void* host, std::uint64_t bytes) {
  if (const int code = impl->card->buffer_fault("map")) return code;
  if (tensor == impl->logits) return kWrongDirection;
  const auto found = impl->mapped.find(tensor);
  if (found == impl->mapped.end() || bytes != found->second.info.byte_size) return kMapBroken;
  found->second.host = static_cast<std::uint8_t*>(host);
  return CalrtSuccess;
}

CalrtCode CalrtInputBuf::SliceTensor(const std::string& tensor, std::uint64_t offset,
                                     std::uint64_t bytes) {
  if (const int code = impl->card->buffer_fault("slice")) return code;
  const auto found = impl->mapped.find(tensor);
  if (found == impl->mapped.end()) return kOutOfRange;
  const std::uint64_t whole = found->second.info.byte_size;
  if (offset > whole || bytes > whole - offset) return kOutOfRange;
  found->second.slice = {offset, bytes};
  return CalrtSuccess;
}

CalrtCode CalrtInputBuf::UndoSlice() {
  for (auto& [name, tensor] : impl->mapped) tensor.slice.reset();
  return CalrtSuccess;
}

void CalrtInputBuf::SetKvSeq(KvSeqId sequence) { impl->sequence = sequence; }

const std::vector<TensorInfo>& CalrtInputBuf::Tensors() const { return impl->tensors; }

CalrtOutputBuf::CalrtOutputBuf(VirtualDevice* device, const std::string& model)
    : impl(std::make_shared<detail::Output>()) {
  const emulator::Graph graph = device->impl->graph(model);
  impl->card = device->impl;
  impl->model = model;
  impl->tensors = graph.info.tensors;
  impl->reports = device->impl->reports_stages();
  if (const TensorInfo* logits = find(impl->tensors, graph.logits)) impl->mapped.info = *logits;
}

CalrtCode CalrtOutputBuf::MapBuf(const std::string& tensor, void* host, std::uint64_t bytes) {
  if (const int code = impl->card->buffer_fault("map")) return code;
  if (tensor != impl->mapped.info.name)
    return find(impl->tensors, tensor) != nullptr ? kWrongDirection : kMapBroken;
  if (bytes != impl->mapped.info.byte_size) return kMapBroken;
  impl->mapped.host = static_cast<std::uint8_t*>(host);
  return CalrtSuccess;
}

CalrtCode CalrtOutputBuf::Wait() {
  if (!impl->job) return kNotConfigured;
  return impl->card->wait(impl->job, &impl->status);
}

BufStatus CalrtOutputBuf::GetStatus() const { return impl->status; }

const std::vector<TensorInfo>& CalrtOutputBuf::Tensors() const { return impl->tensors; }

bool CalrtOutputBuf::GetStageTimes(StageTimes* out) const {
  if (!impl->reports || !impl->job) return false;
  *out = impl->job->flight->times;
  return true;
}

CalrtCode infer_with_fixed_task_type(VirtualDevice* device, const std::string& model,
                                     CalrtInputBuf* input, CalrtOutputBuf* output,
                                     TaskType engine) {
  if (input->impl->model != model || output->impl->model != model) return kIllegalValue;
  output->impl->status = BufStatus::PENDING;
  output->impl->job.reset();
  return device->impl->submit(model, input->impl->mapped, output->impl->mapped,
                              input->impl->sequence, engine, &output->impl->job);
}

CalrtCode infer(VirtualDevice* device, const std::string& model, CalrtInputBuf* input,
                CalrtOutputBuf* output) {
  return infer_with_fixed_task_type(device, model, input, output, -1);
}

}  // namespace calrt

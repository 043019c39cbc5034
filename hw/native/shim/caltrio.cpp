// The C ABI: each function keeps the vendor's exceptions inside.
#include "caltrio.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>

#include "ring.hpp"

namespace shim {

// One call at a time that may take long, or for ever, in a thread of its own.
class SlowCall {
 public:
  ~SlowCall() {  // only once it is over
    if (thread_.joinable()) thread_.join();
  }
  template <typename Call>
  std::int32_t begin(Call call) {
    if (running_.load()) return kBusy;
    if (thread_.joinable()) thread_.join();
    running_ = true;
    try {
      thread_ = std::thread([this, call] {
        begin_thread("caltrio-control");
        code_ = call();
        running_ = false;
      });
    } catch (...) {
      running_ = false;  // there is no thread
      throw;
    }
    return 0;
  }
  bool over() const { return !running_.load(); }
  std::int32_t code() const { return code_; }

 private:
  static constexpr std::int32_t kBusy = 17;
  std::atomic<bool> running_{false};
  std::int32_t code_ = 0;
  std::thread thread_;
};

}  // namespace shim

struct caltrio_device {
  explicit caltrio_device(const char* path)
      : path(path), calbin(std::make_unique<calrt::Calbin>(path)), ring(&vendor) {}
  std::string path;
  calrt::VirtualDevice vendor;
  std::unique_ptr<calrt::Calbin> calbin;
  std::mutex kv_mu;  // a load of the model and a late release may come together
  std::unique_ptr<calrt::KvManager> kv;
  shim::Ring ring;      // its threads use the rest,
  shim::SlowCall slow;  // and this one the ring too
};

namespace {

template <typename Call>
std::int32_t guarded(Call call, std::int32_t failure = shim::kUnexpected) noexcept {
  try {
    return call();
  } catch (...) {
    return failure;
  }
}

const calrt::ModelInfo* model_at(caltrio_device* device, std::int32_t index) {
  const auto& models = device->calbin->GetAllModels();
  return index >= 0 && index < static_cast<std::int32_t>(models.size())
             ? &models[static_cast<std::size_t>(index)]
             : nullptr;
}

void describe(const calrt::TensorInfo& tensor, caltrio_tensor* out) {
  *out = {};
  out->name = tensor.name.c_str();
  out->dtype = static_cast<std::int32_t>(tensor.dtype);
  out->rank = static_cast<std::int32_t>(tensor.shape.size());
  std::copy_n(tensor.shape.begin(), std::min<std::size_t>(tensor.shape.size(), 8), out->shape);
  out->byte_size = tensor.ByteSize();
}

constexpr std::int32_t kNotFound = 14, kResetFailed = 25;

}  // namespace

extern "C" {

std::int32_t caltrio_abi(void) { return 1; }

caltrio_device* caltrio_open(const char* calbin, std::int32_t* code) {
  caltrio_device* made = nullptr;
  *code = guarded([&] {
    auto device = std::make_unique<caltrio_device>(calbin);
    const calrt::CalrtCode rc = device->calbin->code();
    if (rc == calrt::CalrtSuccess) {
      made = device.release();
      return rc;
    }
    device->ring.stop();
    return rc;
  });
  return made;
}

void caltrio_stop(caltrio_device* device) { device->ring.stop(); }

std::int32_t caltrio_stopped(caltrio_device* device) {
  return device->slow.over() && device->ring.stopped();
}

void caltrio_free(caltrio_device* device) {
  guarded([&] {
    delete device;
    return 0;
  });
}

std::int32_t caltrio_model_count(caltrio_device* device) {
  return guarded([&] { return static_cast<std::int32_t>(device->calbin->GetAllModels().size()); }, 0);
}

const char* caltrio_model_name(caltrio_device* device, std::int32_t model) {
  const calrt::ModelInfo* info = model_at(device, model);
  return info == nullptr ? nullptr : info->name.c_str();
}

std::int32_t caltrio_model_tensors(caltrio_device* device, std::int32_t model) {
  const calrt::ModelInfo* info = model_at(device, model);
  return info == nullptr ? 0 : static_cast<std::int32_t>(info->tensors.size());
}

std::int32_t caltrio_model_tensor(caltrio_device* device, std::int32_t model, std::int32_t index,
                                  caltrio_tensor* out) {
  const calrt::ModelInfo* info = model_at(device, model);
  if (info == nullptr || index < 0 || index >= static_cast<std::int32_t>(info->tensors.size()))
    return kNotFound;
  describe(info->tensors[static_cast<std::size_t>(index)], out);
  return 0;
}

std::int32_t caltrio_model_metadata(caltrio_device* device, std::int32_t model, std::int32_t index,
                                    const char** key, const char** value) {
  const calrt::ModelInfo* info = model_at(device, model);
  if (info == nullptr || index < 0 || index >= static_cast<std::int32_t>(info->metadata.size()))
    return kNotFound;
  const auto& entry = info->metadata[static_cast<std::size_t>(index)];
  *key = entry.first.c_str();
  *value = entry.second.c_str();
  return 0;
}

std::int32_t caltrio_configure(caltrio_device* device, std::int32_t parallel) {
  return guarded([&] {
    calrt::CalrtCode rc = device->vendor.Configure(*device->calbin);
    if (rc != calrt::CalrtSuccess) return rc;
    if (parallel) rc = device->vendor.EnableParallelMode(true);
    if (rc != calrt::CalrtSuccess) return rc;
    {
      const std::lock_guard lock(device->kv_mu);
      device->kv = std::make_unique<calrt::KvManager>(device->vendor.GetKvManager());
    }
    device->ring.open();
    return rc;
  });
}

std::int32_t caltrio_reset(caltrio_device* device, std::int64_t timeout_ns) {
  return guarded([&] {
    device->ring.shut();
    const calrt::CalrtCode rc = device->vendor.Reset();
    if (rc != calrt::CalrtSuccess) return rc;
    if (!device->ring.empty_within(timeout_ns)) return kResetFailed;
    {
      const std::lock_guard lock(device->kv_mu);
      device->kv.reset();
    }
    device->calbin = std::make_unique<calrt::Calbin>(device->path);  // all is made anew (9.2)
    return device->calbin->code();
  });
}

std::int32_t caltrio_begin_configure(caltrio_device* device, std::int32_t parallel) {
  return guarded([&] {
    return device->slow.begin([=] { return caltrio_configure(device, parallel); });
  });
}

std::int32_t caltrio_begin_reset(caltrio_device* device, std::int64_t timeout_ns) {
  return guarded([&] {
    return device->slow.begin([=] { return caltrio_reset(device, timeout_ns); });
  });
}

std::int32_t caltrio_ended(caltrio_device* device, std::int32_t* code) {
  if (!device->slow.over()) return 0;
  *code = device->slow.code();
  return 1;
}

std::int32_t caltrio_kv_can_allocate(caltrio_device* device, std::uint32_t sequences) {
  return guarded(
      [&] {
        const std::lock_guard lock(device->kv_mu);
        return device->kv && device->kv->canAllocate(sequences) ? 1 : 0;
      },
      0);
}

std::int32_t caltrio_kv_apply(caltrio_device* device, std::int32_t sequence, std::uint32_t tokens) {
  return guarded(
      [&] {
        const std::lock_guard lock(device->kv_mu);
        return device->kv && device->kv->Apply(sequence, tokens) ? 1 : 0;
      },
      0);
}

void caltrio_kv_release(caltrio_device* device, std::int32_t sequence) {
  guarded([&] {
    const std::lock_guard lock(device->kv_mu);
    if (device->kv) device->kv->Release(sequence);
    return 0;
  });
}

std::int32_t caltrio_set_csr(caltrio_device* device, const char* model, const char* name,
                             std::uint32_t value) {
  return guarded([&] { return device->vendor.SetCsrByName(model, name, value); });
}

caltrio_buffers* caltrio_buffers_new(caltrio_device* device, const char* model) {
  caltrio_buffers* made = nullptr;
  guarded([&] {
    auto buffers = std::make_unique<caltrio_buffers>(&device->vendor, model);
    buffers->tensors = buffers->input.Tensors();
    made = buffers.release();
    return 0;
  });
  return made;
}

void caltrio_buffers_free(caltrio_buffers* buffers) {
  guarded([&] {
    delete buffers;
    return 0;
  });
}

std::int32_t caltrio_buffers_tensor(caltrio_buffers* buffers, const char* name,
                                    caltrio_tensor* out) {
  for (const calrt::TensorInfo& tensor : buffers->tensors) {
    if (tensor.name != name) continue;
    describe(tensor, out);
    return 0;
  }
  return kNotFound;
}

std::int32_t caltrio_map_input(caltrio_buffers* buffers, const char* tensor, void* host,
                               std::uint64_t bytes) {
  return guarded([&] { return buffers->input.MapBuf(tensor, host, bytes); });
}

std::int32_t caltrio_map_output(caltrio_buffers* buffers, const char* tensor, void* host,
                                std::uint64_t bytes) {
  return guarded([&] {
    buffers->output_name = tensor;
    return buffers->output.MapBuf(tensor, host, bytes);
  });
}

std::int32_t caltrio_slice(caltrio_buffers* buffers, const char* tensor, std::uint64_t offset,
                           std::uint64_t bytes) {
  return guarded([&] { return buffers->input.SliceTensor(tensor, offset, bytes); });
}

std::int32_t caltrio_undo_slices(caltrio_buffers* buffers) {
  return guarded([&] { return buffers->input.UndoSlice(); });
}

std::int32_t caltrio_direct_infer(caltrio_device* device, caltrio_buffers* buffers,
                                  std::int32_t engine, std::int32_t kv_sequence) {
  return guarded([&] {
    buffers->input.SetKvSeq(kv_sequence);
    return shim::call_infer(&device->vendor, buffers, engine);
  });
}

std::int32_t caltrio_direct_wait(caltrio_buffers* buffers) {
  caltrio_completion done{};
  shim::call_wait(buffers, &done);
  return done.rc;
}

std::int32_t caltrio_submit(caltrio_device* device, caltrio_buffers* buffers, std::uint64_t token,
                            std::int32_t engine, std::int32_t kv_sequence) {
  return guarded([&] {
    buffers->input.SetKvSeq(kv_sequence);
    return device->ring.submit(buffers, token, engine);
  });
}

void caltrio_withdraw(caltrio_device* device, std::uint64_t token) { device->ring.withdraw(token); }

void caltrio_limit(caltrio_device* device, std::int32_t max_inflight) {
  device->ring.limit(max_inflight);
}

void caltrio_resume(caltrio_device* device) { device->ring.resume(); }

std::int32_t caltrio_event_fd(caltrio_device* device) { return device->ring.event_fd(); }

std::int32_t caltrio_drain(caltrio_device* device, caltrio_submission* submissions,
                           std::int32_t* submitted, caltrio_completion* completions,
                           std::int32_t* completed, std::int32_t most) {
  return device->ring.drain(submissions, submitted, completions, completed, most);
}

}  // extern "C"

// The part of the CalRT 0.7.6 C++ API that caltrio uses.
//
// KNOWN marks what the implementation specification names or says; ASSUMED marks everything else:
// signatures, types, lifetimes. This is the one place of those assumptions (docs/assumptions.md).
// The emulator implements this header. On the day the SDK is there, adapt here: include its own
// header and forward where it differs; the shim calls nothing else.
#ifndef CALTRIO_CALRT_HPP
#define CALTRIO_CALRT_HPP

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace calrt {

// KNOWN: CalrtSuccess, and the numbers of specification section 8. ASSUMED: that 0 is success, int.
using CalrtCode = int;
inline constexpr CalrtCode CalrtSuccess = 0;

// KNOWN: the names PrimitiveType and KvSeqId. ASSUMED: members and representation.
enum class PrimitiveType { S32, BF16, F32 };
using KvSeqId = std::int32_t;

// KNOWN: Ping 0, Pong 1, and that infer_with_fixed_task_type takes one. ASSUMED: the type.
using TaskType = int;

// KNOWN: DONE_CCU_EXCEPTION. ASSUMED: the other members.
enum class BufStatus { PENDING, DONE, DONE_CCU_EXCEPTION };

// ASSUMED: how a tensor of a graph is described; ByteSize() is KNOWN.
struct TensorInfo {
  std::string name;
  std::vector<std::uint64_t> shape;
  PrimitiveType dtype;
  std::uint64_t byte_size;
  std::uint64_t ByteSize() const { return byte_size; }
};

// ASSUMED: all of it. Metadata as text; KNOWN only that the graph's metadata has the tile size.
struct ModelInfo {
  std::string name;
  std::vector<TensorInfo> tensors;
  std::vector<std::pair<std::string, std::string>> metadata;
};

// ASSUMED, and optional: when the stages of a job ran, CLOCK_MONOTONIC ns; -1 where not reported.
inline constexpr int kMostDies = 8;
struct StageTimes {
  std::int32_t engine = -1;
  std::int32_t dies = 0;
  std::int64_t h2d_start = -1, h2d_end = -1;
  std::int64_t die_start[kMostDies] = {}, die_end[kMostDies] = {};
  std::int64_t d2h_start = -1, d2h_end = -1;
};

namespace detail {
struct Calbin;
struct Card;
struct Input;
struct Output;
}  // namespace detail

// KNOWN: the class. ASSUMED: made from a file; code() says how the load ended.
class Calbin {
 public:
  explicit Calbin(const std::string& path);
  CalrtCode code() const;
  // KNOWN: the name. ASSUMED: where it is, and what it returns.
  const std::vector<ModelInfo>& GetAllModels() const;
  std::shared_ptr<detail::Calbin> impl;
};

// KNOWN: Apply() returns bool without a reason; canAllocate(1). ASSUMED: the arguments (a sequence
// and its total length; a count of sequences), Release(), and that these may be called from another
// thread than infer() and Wait().
class KvManager {
 public:
  bool canAllocate(std::uint32_t sequences) const;
  bool Apply(KvSeqId sequence, std::uint32_t target_tokens);
  void Release(KvSeqId sequence);
  std::shared_ptr<detail::Card> card;
};

// KNOWN: the class and the names of the calls. ASSUMED: their signatures, Configure().
class VirtualDevice {
 public:
  VirtualDevice();
  ~VirtualDevice();
  VirtualDevice(const VirtualDevice&) = delete;
  VirtualDevice& operator=(const VirtualDevice&) = delete;

  CalrtCode Configure(const Calbin& calbin);
  KvManager GetKvManager();
  CalrtCode EnableParallelMode(bool on);
  // ASSUMED: the CSRs count for the infer() of that graph that follows, and this may be called
  // while earlier jobs run.
  CalrtCode SetCsrByName(const std::string& model, const std::string& name, std::uint32_t value);
  CalrtCode ResetCCU();
  CalrtCode ResetConfiguration();
  CalrtCode Reset();

  std::shared_ptr<detail::Card> impl;
};

// KNOWN: MapBuf, SliceTensor, and that there is an undo. ASSUMED: per tensor by name; offsets in
// bytes; the mapped memory is read or written by DMA whenever a job with the buffer runs.
class CalrtInputBuf {
 public:
  CalrtInputBuf(VirtualDevice* device, const std::string& model);
  CalrtCode MapBuf(const std::string& tensor, void* host, std::uint64_t bytes);
  CalrtCode SliceTensor(const std::string& tensor, std::uint64_t offset, std::uint64_t bytes);
  CalrtCode UndoSlice();
  // ASSUMED: which sequence's KV the job works on.
  void SetKvSeq(KvSeqId sequence);
  const std::vector<TensorInfo>& Tensors() const;
  std::shared_ptr<detail::Input> impl;
};

// KNOWN: Wait(), GetStatus(). ASSUMED: Wait() blocks without a bound, once per submit.
class CalrtOutputBuf {
 public:
  CalrtOutputBuf(VirtualDevice* device, const std::string& model);
  CalrtCode MapBuf(const std::string& tensor, void* host, std::uint64_t bytes);
  CalrtCode Wait();
  BufStatus GetStatus() const;
  const std::vector<TensorInfo>& Tensors() const;
  // ASSUMED, optional.
  bool GetStageTimes(StageTimes* out) const;
  std::shared_ptr<detail::Output> impl;
};

// KNOWN: the names and the order of the arguments (section 6.4). ASSUMED: their types.
CalrtCode infer(VirtualDevice* device, const std::string& model, CalrtInputBuf* input,
                CalrtOutputBuf* output);
CalrtCode infer_with_fixed_task_type(VirtualDevice* device, const std::string& model,
                                     CalrtInputBuf* input, CalrtOutputBuf* output, TaskType engine);

}  // namespace calrt

#endif

// What the emulated card is: the calbin (what a program may know) and the card file beside it (what
// it may not: timing, semantics, faults). Both are lines of text; docs/emulator.md has the keys.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "calrt/calrt.hpp"

namespace emulator {

// A file that cannot be used; `code` is what the runtime returns for it.
struct FileError : std::runtime_error {
  FileError(int code, const std::string& what) : std::runtime_error(what), code(code) {}
  int code;
};

struct Graph {
  calrt::ModelInfo info;
  std::string kind;                       // which line of `compute` its jobs take
  std::string tokens, position, logits;   // names of its tensors
  std::string csr_cur, csr_total;         // names of its CSRs
  int tile_d0 = 1;
};

struct CalbinFile {
  std::vector<Graph> graphs;
  std::vector<calrt::ModelInfo> models;
  const Graph* find(const std::string& name) const;
};

enum class DmaOrder { Ready, Issue };
enum class SlotRelease { H2d, Compute, D2h, Wait };
enum class Signal { PerJob, ComputeIdle };
enum class WaitOrder { InOrder, Any };
enum class WhenFull { Block, Busy };
enum class KvAfter { Unchanged, Applied, Unknown };
enum class ResetScope { None, Job, Engine, Device };
enum class Jitter { None, Uniform, Exponential, Lognormal };

enum Stage { kSubmit, kH2d, kCompute, kD2h, kInterrupt, kStages };

// Where a fault of the card strikes. `at` counts the calls at that point from 0.
struct FaultLine {
  std::string point;
  int code = 0;
  std::int64_t at = -1;     // only that call; -1: any
  std::int64_t every = 0;   // each so-manieth call; 0: see `at`
  std::int64_t times = 1;   // at most so often; 0: always
};

struct CardFile {
  int engines = 2;
  bool overlap = true;
  bool full_duplex = true;
  DmaOrder dma_order = DmaOrder::Ready;
  std::vector<int> compute_stages{1000};    // thousandths of a job's compute
  std::vector<int> compute_sharing{1000};   // thousandths of speed for 1, 2, … jobs
  SlotRelease slot_release = SlotRelease::Wait;
  Signal completion_signal = Signal::PerJob;
  WaitOrder completion_order = WaitOrder::InOrder;
  WhenFull submit_when_full = WhenFull::Busy;
  KvAfter kv_after_failed_wait = KvAfter::Unknown;
  ResetScope reset_scope = ResetScope::None;

  std::int64_t submit_ns = 0, interrupt_ns = 0, reset_ns = 0;
  std::int64_t h2d_latency_ns = 0, h2d_bytes_per_s = 1'000'000'000'000;
  std::int64_t d2h_latency_ns = 0, d2h_bytes_per_s = 1'000'000'000'000;
  struct Compute {
    std::int64_t base_ns = 0, per_token_ps = 0, per_pair_ps = 0;
  };
  std::map<std::string, Compute> compute;   // by kind of graph
  Jitter jitter = Jitter::None;
  std::int64_t jitter_cv_ppm = 0;           // millionths
  std::uint64_t jitter_seed = 0;
  std::array<bool, kStages> jittered{};

  std::int64_t kv_tokens = 0;               // 0: no limit
  bool report_stages = true;
  bool compute_tokens = true;
  std::vector<FaultLine> faults;
};

CalbinFile read_calbin(const std::string& path);
CardFile read_card(const std::string& path);

}  // namespace emulator

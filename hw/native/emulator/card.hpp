// The emulated card: an engine whose events one thread carries out in real time, with memory of its
// own, DMA to and from mapped host memory, KV, CSRs and faults.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>

#include "calrt/calrt.hpp"
#include "card_file.hpp"
#include "engine.hpp"
#include "tokens.hpp"

namespace emulator {

// A tensor in mapped host memory, and the part of it that the next job uses.
struct Mapped {
  calrt::TensorInfo info;
  std::uint8_t* host = nullptr;
  std::optional<std::pair<std::uint64_t, std::uint64_t>> slice;
};

// One submission, from infer() to the return of Wait().
struct Job {
  std::shared_ptr<Flight> flight = std::make_shared<Flight>();
  Transfer transfer;
  std::vector<std::uint16_t> logits;  // in the card's memory, until D2H
  std::int64_t number = 0;
  Ns due = -1;         // when Wait() may return; -1 until D2H has begun
  bool killed = false; // by a reset
  bool hangs = false, hangs_for_ever = false, exception = false;
  int code = 0;
};
using JobPtr = std::shared_ptr<Job>;

class Card {
 public:
  Card();
  ~Card();

  int configure(const CalbinFile& calbin, const CardFile& file);
  int set_csr(const std::string& model, const std::string& name, std::uint32_t value);
  bool can_allocate(std::uint32_t sequences);
  bool apply(calrt::KvSeqId sequence, std::uint32_t target);
  void release(calrt::KvSeqId sequence);
  int enable_parallel(bool on);
  int reset(ResetScope asked);
  Graph graph(const std::string& model);
  bool reports_stages();
  // What a MapBuf() or a SliceTensor() is to return, where a fault says so.
  int buffer_fault(const char* point);

  // infer(): blocks for the submit time, and for a slot where the semantics say so.
  int submit(const std::string& model, const std::map<std::string, Mapped>& inputs,
             const Mapped& output, calrt::KvSeqId sequence, int engine, JobPtr* made);
  // Wait(): the return code; `status` is that of the buffer.
  int wait(const JobPtr& job, calrt::BufStatus* status);

 private:
  using Lock = std::unique_lock<std::mutex>;
  void loop();
  Ns catch_up(Lock& lock);
  const FaultLine* strikes(const char* point);
  Ns jittered(Stage stage, Ns duration, std::int64_t number) const;
  void read(Job& job, const std::map<std::string, Mapped>& inputs);
  void compute(Job& job, const Mapped& output, std::size_t tile_d0);
  void write(Job& job, const Mapped& output, Ns end);

  std::mutex mu_;
  std::condition_variable timer_;    // for the card's thread: an earlier event, or the end
  std::condition_variable changed_;  // for callers: a slot, a completion, a reset
  CalbinFile calbin_;
  CardFile file_;
  bool configured_ = false, stopping_ = false;
  bool news_ = false;                // a job may be waited for
  int catching_up_ = 0;              // callers that let due events come first
  std::uint64_t generation_ = 0;     // of resets
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<TokenModel> model_;
  Kv kv_;
  std::vector<std::vector<std::uint16_t>> spare_;  // memory of the card for logits
  std::map<std::pair<std::string, std::string>, std::uint32_t> csrs_;
  std::deque<JobPtr> issued_;        // submitted, Wait() not yet returned; in order
  std::int64_t jobs_ = 0;
  std::unordered_map<std::string, std::int64_t> calls_;
  std::thread thread_;
};

}  // namespace emulator

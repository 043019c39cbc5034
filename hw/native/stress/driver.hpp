// One device driven as hw/device.py does it: one thread, reports fetched when the eventfd is readable,
// CSRs set only while no job waits to be submitted. And the ledger that each report is held against.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../shim/caltrio.h"
#include "random.hpp"
#include "watch.hpp"
#include "world.hpp"

namespace stress {

// The host memory of one slot, exactly as large as the tensors: a byte beyond is found. While no job
// has it, each byte is `mark`: a transfer that comes late shows.
struct Slot {
  explicit Slot(const World& world, std::size_t graph);
  void scribble(int value);
  bool quiet() const;  // all of it
  bool output_untouched() const;
  bool inputs_as_loaded() const;

  std::size_t graph;
  caltrio_buffers* handle = nullptr;
  std::unique_ptr<std::int32_t[]> tokens, positions;
  std::unique_ptr<std::uint16_t[]> logits;
  std::size_t count, entries;  // of tokens and positions; of logits
  std::vector<std::int32_t> loaded_tokens, loaded_positions;
  std::uint8_t mark = 0;
  bool busy = false, sliced = false;
};

struct Sequence {
  int id = 0;
  std::vector<std::int32_t> history;  // what the card's KV holds
  bool busy = false;
};

struct Job {
  enum class State { Handed, Flying, Over };
  std::uint64_t token = 0;
  State state = State::Handed;
  Slot* slot = nullptr;
  int sequence = -1, engine = -1;
  std::vector<std::int32_t> tokens;
  std::uint64_t output_bytes = 0;
  bool withdrawn = false;          // asked for
  bool alone = false;              // nothing was on the card when it was handed over
  int resets = 0, generation = 0;  // begun before it was handed over; configured
  Ns handed_ns = 0;
  bool came_back = false;
  caltrio_completion done{};
};

// What happened in all loops: a run in which one of these never did has tested less than it says.
struct Totals {
  std::int64_t submitted = 0, completed = 0, exact = 0, withdrawn = 0, refused = 0, failed = 0,
               killed = 0, resets = 0, hangs = 0, held = 0, bursts = 0, full = 0, direct = 0,
               raised = 0, abandoned = 0, stopped_flying = 0;
};

class Driver {
 public:
  Driver(World& world, Random& random, std::string calbin, Totals& totals);

  void open();
  void configure();
  // Until so many more jobs have ended; then, if `to_idle`, until none is left. Resets a card that
  // hangs.
  void work(std::int64_t jobs, bool to_idle);
  // Until the reset succeeds or turns out to be none that this card has.
  void reset(bool stop_meanwhile);
  void abandon_reset();
  void close();
  void check_intervals() const;
  void describe() const;
  bool flies() const { return flying_ > 0; }
  bool dead() const { return dead_ || stopped_; }

 private:
  // driver.cpp
  void make_slots();
  void map(Slot& slot);
  void free_slots();
  void shut_ring();
  int one_reset(bool stop_meanwhile);
  int begin_reset();
  int ended(const char* what, bool stop_meanwhile);
  void raise_limit();
  void settle(std::uint64_t token, const char* what);
  void stop();
  void meddle();
  void watch_progress();
  void limit(int value);
  void resume();
  void withdraw(std::uint64_t token);
  void can_allocate();
  void no_kv();
  void release(int sequence);
  void release_idle();

  // jobs.cpp
  void start();
  void step();
  void burst();
  void held();
  void direct();
  Sequence* any_sequence();
  Slot* free_slot(std::size_t graph);
  bool apply(Sequence& sequence, std::int64_t target);
  bool load(Job& job, Slot& slot, std::int64_t past, bool set_csrs);
  bool set_csrs(const Graph& graph, std::int64_t past, std::int64_t total);
  bool slice(Slot& slot, const std::string& tensor, std::int64_t offset, std::int64_t count);
  void unload(Slot& slot);
  int hand(Job job);

  // reports.cpp
  void listen(Ns patience_ns);
  int drain(int most);
  void drain_all();
  void reported(const caltrio_submission& report);
  void judge_refusal(const Job& job, int rc);
  void completed(const caltrio_completion& done);
  void judge_times(const Job& job, const caltrio_completion& done, bool killed) const;
  void judge_stages(const Job& job, const caltrio_completion& done, bool killed) const;
  void judge_durations(const Job& job, const caltrio_completion& done) const;
  bool judge_failure(Job& job, const caltrio_completion& done, bool killed);
  void judge_output(const Job& job, const std::vector<std::int32_t>& history);
  Job& known(std::uint64_t token, const char* what);
  void give_back(Job& job);
  int limit_between(Ns from, Ns to) const;

  // checks.cpp
  void check_in_flight() const;
  void check_units(int generation) const;

  void check(bool holds, const std::string& what) const {
    if (!holds) fail(what);
  }
  void expect(int got, int wanted, const std::string& what) const;
  void note(const char* what, std::int64_t which = -1, std::int64_t value = 0);
  bool busy() const { return unreported_ > 0 || flying_ > 0; }

  World& world_;
  Random& random_;
  std::string calbin_;
  Totals& totals_;
  caltrio_device* device_ = nullptr;

  std::map<std::uint64_t, Job> jobs_;
  std::map<int, Sequence> sequences_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::uint64_t next_token_ = 10, last_handed_ = 0;
  int next_sequence_ = 0;
  int unreported_ = 0, flying_ = 0;
  std::int64_t over_ = 0;  // jobs that have ended

  std::map<int, std::int64_t> kv_;  // tokens that each sequence was allowed
  std::int64_t kv_used_ = 0;

  struct Limit {
    Ns begin, end;  // of the call
    int value;
  };
  std::vector<Limit> limits_{{0, 0, 1}};  // as a ring begins

  bool configured_ = false, dead_ = false, stopped_ = false, resetting_ = false;
  bool shut_ = true;  // or on the way to it: the ring withdraws by itself
  int resets_ = 0, generation_ = 0;
  bool failure_seen_ = false;   // resume() is due
  bool surely_failed_ = false;  // and the ring submits nothing until then
  Ns progress_ns_ = 0;
  const char* waiting_for_ = "nothing";
  std::map<std::string, std::int64_t> struck_;

  struct Note {
    Ns at;
    const char* what;
    std::int64_t which, value;
  };
  std::deque<Note> notes_;  // the last that happened
};

}  // namespace stress

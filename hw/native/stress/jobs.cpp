// How jobs are made, loaded and handed over.
#include <algorithm>

#include "driver.hpp"

namespace stress {
namespace {

constexpr int kOutOfRange = 14, kBusy = 17;
constexpr std::size_t kMostSequences = 5;

}  // namespace

Slot* Driver::free_slot(std::size_t graph) {
  for (const auto& slot : slots_)
    if (slot->graph == graph && !slot->busy) return slot.get();
  return nullptr;
}

Sequence* Driver::any_sequence() {
  if (sequences_.empty() || (sequences_.size() < kMostSequences && random_.percent(30))) {
    Sequence& made = sequences_[++next_sequence_];
    made.id = next_sequence_;
    return &made;
  }
  auto chosen = std::next(sequences_.begin(),
                          random_.between(0, static_cast<std::int64_t>(sequences_.size()) - 1));
  return chosen->second.busy ? nullptr : &chosen->second;
}

// The card refuses exactly what does not fit.
bool Driver::apply(Sequence& sequence, std::int64_t target) {
  std::int64_t& allowed = kv_[sequence.id];
  const std::int64_t more = std::max<std::int64_t>(target - allowed, 0);
  const bool fits = world_.kv_tokens == 0 || kv_used_ + more <= world_.kv_tokens;
  expect(caltrio_kv_apply(device_, sequence.id, static_cast<std::uint32_t>(target)), fits, "kv_apply");
  if (fits) {
    kv_used_ += more;
    allowed += more;
  }
  return fits;
}

bool Driver::set_csrs(const Graph& graph, std::int64_t past, std::int64_t total) {
  const auto set = [&](const std::string& name, std::int64_t value, int wanted) {
    const int fault = world_.strike("csr", kOutOfRange);
    expect(
        caltrio_set_csr(device_, graph.name.c_str(), name.c_str(), static_cast<std::uint32_t>(value)),
        fault >= 0 ? fault : wanted, "set_csr of " + name);
    return fault < 0;
  };
  if (random_.percent(3)) set("nowhere", 1, kOutOfRange);
  return set(graph.name + "_cur", past, 0) && set(graph.name + "_total", total, 0);
}

bool Driver::slice(Slot& slot, const std::string& tensor, std::int64_t offset, std::int64_t count) {
  const auto call = [&](std::int64_t from, std::int64_t bytes, int wanted) {
    const int fault = world_.strike("slice", 24);
    expect(caltrio_slice(slot.handle, tensor.c_str(), static_cast<std::uint64_t>(from),
                         static_cast<std::uint64_t>(bytes)),
           fault >= 0 ? fault : wanted, "slice of " + tensor);
    return fault < 0;
  };
  if (random_.percent(3)) call(4, static_cast<std::int64_t>(slot.count) * 4, kOutOfRange);
  return call(offset * 4, count * 4, 0);
}

void Driver::unload(Slot& slot) {
  if (slot.sliced) expect(caltrio_undo_slices(slot.handle), 0, "undo_slices");
  slot.sliced = false;
  slot.scribble(static_cast<int>(random_.between(0, 255)));
}

// Inputs, CSRs and slices; false if a fault was in the way, and then nothing is left of it.
bool Driver::load(Job& job, Slot& slot, std::int64_t past, bool with_csrs) {
  const Graph& graph = world_.graphs[slot.graph];
  check(slot.quiet(), "memory of a free slot was written to: a transfer came late");
  const auto count = static_cast<std::int64_t>(job.tokens.size());
  const bool sliced = random_.percent(60);
  const std::int64_t room = sliced ? static_cast<std::int64_t>(slot.count) - count : 0;
  const std::int64_t token_at = random_.between(0, room), position_at = random_.between(0, room);
  for (std::int64_t index = 0; index < count; ++index) {
    slot.tokens[static_cast<std::size_t>(token_at + index)] =
        job.tokens[static_cast<std::size_t>(index)];
    slot.positions[static_cast<std::size_t>(position_at + index)] =
        static_cast<std::int32_t>(past + index);
  }
  slot.loaded_tokens.assign(slot.tokens.get(), slot.tokens.get() + slot.count);
  slot.loaded_positions.assign(slot.positions.get(), slot.positions.get() + slot.count);
  slot.sliced = sliced;
  const bool loaded = (!with_csrs || set_csrs(graph, past, past + count)) &&
                      (!sliced || (slice(slot, graph.tokens, token_at, count) &&
                                   slice(slot, graph.position, position_at, count)));
  if (!loaded) unload(slot);
  return loaded;
}

// What caltrio_submit() returned; the job is in the ledger unless the ring did not take it.
int Driver::hand(Job job) {
  job.token = ++next_token_;
  job.alone = !busy();
  job.resets = resets_;
  job.generation = generation_;
  job.output_bytes = job.slot->entries * sizeof job.slot->logits[0];
  job.engine = random_.percent(75) ? -1 : static_cast<int>(random_.between(0, world_.engines - 1));
  if (random_.percent(1)) job.engine = world_.engines;  // there is none of that number
  job.handed_ns = now_ns();
  int rc = -1;
  {
    const Watched watched("caltrio_submit");
    rc = caltrio_submit(device_, job.slot->handle, job.token, job.engine, job.sequence);
  }
  note("submit", static_cast<std::int64_t>(job.token), rc);
  if (rc != 0) {
    expect(rc, kBusy, "caltrio_submit");
    check(unreported_ > 0, "the ring took no job, and had none that it held back");
    ++totals_.full;
    return rc;
  }
  last_handed_ = job.token;
  job.slot->busy = true;
  sequences_.at(job.sequence).busy = true;
  ++unreported_;
  const std::uint64_t token = job.token;
  jobs_.emplace(token, std::move(job));
  return rc;
}

// A job, or several, or none: whatever the moment allows and chance wants.
void Driver::start() {
  if (unreported_ > 0 || random_.percent(15)) return;
  if (surely_failed_ && random_.percent(40)) {
    held();
    return;
  }
  if (random_.percent(4)) {
    burst();
    return;
  }
  if (!busy() && !world_.may_hang() && !world_.has("exception") && random_.percent(5)) {
    direct();
    return;
  }
  step();
}

// The next step of some sequence, or nothing if that is not possible now.
void Driver::step() {
  Sequence* sequence = any_sequence();
  if (sequence == nullptr) return;
  const auto past = static_cast<std::int64_t>(sequence->history.size());
  const std::int64_t room = std::min(world_.graphs[0].positions, world_.longest - past);
  const bool prefill = past == 0 || random_.percent(20);
  Slot* slot = free_slot(prefill ? 0 : 1);
  if (slot == nullptr) return;
  if (room <= 0) {
    release(sequence->id);
    sequences_.erase(sequence->id);
    return;
  }
  Job job;
  job.slot = slot;
  job.sequence = sequence->id;
  const std::int64_t count = prefill ? random_.between(1, room) : 1;
  for (std::int64_t index = 0; index < count; ++index)
    job.tokens.push_back(static_cast<std::int32_t>(random_.between(0, world_.vocab - 1)));
  if (!apply(*sequence, past + count)) {
    release(sequence->id);
    sequences_.erase(sequence->id);
    return;
  }
  if (load(job, *slot, past, true)) hand(std::move(job));
}

// Several new sequences with prompts of one length, handed over without a look at the reports: these
// pile up, and the ring is full most of the time.
void Driver::burst() {
  const std::int64_t count = random_.between(1, world_.graphs[0].positions);
  if (!set_csrs(world_.graphs[0], 0, count)) return;
  ++totals_.bursts;
  const char* waited_for = waiting_for_;
  waiting_for_ = "the ring to take a burst";
  for (std::int64_t more = random_.between(2, 5); more > 0; --more) {
    Slot* slot = free_slot(0);
    if (slot == nullptr) break;
    Sequence& sequence = sequences_[++next_sequence_];
    sequence.id = next_sequence_;
    Job job;
    job.slot = slot;
    job.sequence = sequence.id;
    for (std::int64_t index = 0; index < count; ++index)
      job.tokens.push_back(static_cast<std::int32_t>(random_.between(0, world_.vocab - 1)));
    if (!apply(sequence, count) || !load(job, *slot, 0, false)) {
      release(sequence.id);
      sequences_.erase(sequence.id);
      break;
    }
    const Ns begun = now_ns();
    bool taken = false;
    while (!taken) {
      taken = hand(job) == 0;
      if (taken) break;
      if (now_ns() - begun > kDeadlineNs) fail("the ring never took the next job of a burst");
      if (random_.percent(10)) resume();
      if (world_.may_hang() && now_ns() - begun > 5'000'000) break;
      if (random_.percent(5)) withdraw(last_handed_);
    }
    if (taken) continue;
    unload(*slot);
    release(sequence.id);
    sequences_.erase(sequence.id);
    break;
  }
  waiting_for_ = waited_for;
}

// After a failure that nobody has resumed from the ring holds one job back, and takes no other.
void Driver::held() {
  Sequence* sequence = any_sequence();
  if (sequence == nullptr) return;
  Slot* slot = free_slot(0);
  const auto past = static_cast<std::int64_t>(sequence->history.size());
  if (slot == nullptr || past >= world_.longest || !apply(*sequence, past + 1)) return;
  Job job;
  job.slot = slot;
  job.sequence = sequence->id;
  job.tokens = {1};
  if (!load(job, *slot, past, true)) return;
  expect(hand(job), 0, "submit after a failure");
  ++totals_.held;
  const std::uint64_t token = next_token_;
  if (random_.percent(50)) expect(hand(job), kBusy, "a second submit after a failure");
  if (random_.percent(50)) limit(static_cast<int>(random_.between(1, 3)));
  if (random_.percent(50)) listen(random_.between(0, 300'000));
  check(jobs_.at(token).state == Job::State::Handed,
        "a job was submitted after a failure without caltrio_resume");
  if (random_.percent(50)) {
    withdraw(token);
    drain_all();
    check(jobs_.at(token).state == Job::State::Over,
          "a job held back was withdrawn, and that was not reported");
  } else if (flying_ == 0 && !world_.may_hang()) {
    resume();
    settle(token, "the job that caltrio_resume lets go");
  }
}

// One job past the ring, in this thread; its sequence ends with it.
void Driver::direct() {
  Slot* slot = free_slot(0);
  Sequence sequence;
  sequence.id = ++next_sequence_;
  Job job;
  job.slot = slot;
  job.sequence = sequence.id;
  job.tokens = {2, 1};
  job.alone = true;
  job.resets = resets_;
  if (apply(sequence, 2) && load(job, *slot, 0, true)) {
    const Watched watched("a call past the ring");
    const int rc = caltrio_direct_infer(device_, slot->handle, -1, sequence.id);
    if (rc != 0) {
      judge_refusal(job, rc);
    } else {
      caltrio_completion done{};
      done.rc = caltrio_direct_wait(slot->handle);
      if (done.rc != 0) judge_failure(job, done, false);
      if (done.rc == 0) judge_output(job, job.tokens);
      ++totals_.direct;
    }
    unload(*slot);
  }
  release(sequence.id);
}

}  // namespace stress

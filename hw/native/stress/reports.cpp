// Reports of the ring, each held against the ledger.
#include <poll.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "driver.hpp"
#include "reference.hpp"

namespace stress {
namespace {

constexpr int kIllegalValue = 4, kWaitFailed = 13, kUnexpected = 15, kNotConfigured = 16, kBusy = 17,
              kUnavailable = 18;
constexpr std::uint16_t kNaN = 0x7FC0;
constexpr int kBatch = 16;

std::string named(const char* what, std::uint64_t token) {
  return std::string(what) + " of job " + std::to_string(token);
}

}  // namespace

void Driver::listen(Ns patience_ns) {
  pollfd readable{caltrio_event_fd(device_), POLLIN, 0};
  const timespec timeout{0, static_cast<long>(patience_ns)};
  const int count = ppoll(&readable, 1, &timeout, nullptr);
  check(count >= 0, "ppoll failed");
  if (count > 0) drain(static_cast<int>(random_.percent(30) ? 1 : random_.between(1, kBatch)));
}

int Driver::drain(int most) {
  std::array<caltrio_submission, kBatch> submissions;
  std::array<caltrio_completion, kBatch> completions;
  std::int32_t submitted = -1, done = -1;
  const int sum =
      caltrio_drain(device_, submissions.data(), &submitted, completions.data(), &done, most);
  check(submitted >= 0 && submitted <= most && done >= 0 && done <= most && sum == submitted + done,
        "caltrio_drain counts wrongly");
  for (int index = 0; index < submitted; ++index)
    reported(submissions[static_cast<std::size_t>(index)]);
  for (int index = 0; index < done; ++index) completed(completions[static_cast<std::size_t>(index)]);
  if (sum > 0) progress_ns_ = now_ns();
  return sum;
}

void Driver::drain_all() {
  while (drain(kBatch) > 0) {
  }
}

Job& Driver::known(std::uint64_t token, const char* what) {
  const auto found = jobs_.find(token);
  check(found != jobs_.end(), named(what, token) + ", which the ring never took");
  return found->second;
}

// The job has ended: its slot is written over at once, and its sequence may go on.
void Driver::give_back(Job& job) {
  job.state = Job::State::Over;
  ++over_;
  job.slot->busy = false;
  unload(*job.slot);
  const auto sequence = sequences_.find(job.sequence);
  if (sequence != sequences_.end()) sequence->second.busy = false;
}

void Driver::reported(const caltrio_submission& report) {
  note(report.withdrawn ? "withdrawn" : "submitted", static_cast<std::int64_t>(report.token),
       report.rc);
  Job& job = known(report.token, "submission");
  check(job.state == Job::State::Handed, named("second submission", report.token));
  --unreported_;
  if (!report.withdrawn && report.rc == 0) {
    job.state = Job::State::Flying;
    ++flying_;
    ++totals_.submitted;
    check(job.engine < world_.engines, "the card took a job for an engine that it has not");
    return;
  }
  check(job.slot->output_untouched() && job.slot->inputs_as_loaded(),
        "a job that never ran wrote to its memory");
  if (report.withdrawn) {
    expect(report.rc, 0, named("the withdrawal", report.token));
    check(job.withdrawn || shut_, named("unasked withdrawal", report.token));
    ++totals_.withdrawn;
  } else {
    judge_refusal(job, report.rc);
    ++totals_.refused;
  }
  give_back(job);
}

int Driver::limit_between(Ns from, Ns to) const {
  int most = 0;
  for (std::size_t index = 0; index < limits_.size(); ++index) {
    const bool ended = index + 1 < limits_.size() && limits_[index + 1].end < from;
    if (limits_[index].begin <= to && !ended) most = std::max(most, limits_[index].value);
  }
  return most;
}

void Driver::judge_refusal(const Job& job, int rc) {
  // In a burst those before it may be on the card, handed over just before.
  const bool free_engine =
      job.alone || (job.engine < 0 && limit_between(job.handed_ns, now_ns()) <= world_.engines);
  const bool was_reset = world_.reset_scope == "device" && resets_ > job.resets;
  if (rc == kIllegalValue && job.engine >= world_.engines) return;
  if (rc == kUnexpected && ++struck_["throw"] <= world_.most("throw")) return;
  if ((rc == kUnavailable || rc == kNotConfigured) && was_reset) return;
  if (rc == kBusy && !world_.blocks && !free_engine) return;
  for (const Fault& fault : world_.faults)
    if (fault.point == "infer" && rc == (fault.code != 0 ? fault.code : kBusy)) {
      check(++struck_["infer"] <= world_.most("infer"),
            "infer() failed more often than the card was told to");
      return;
    }
  fail(named("infer()", job.token) + " returned " + std::to_string(rc) + " for no reason");
}

void Driver::completed(const caltrio_completion& done) {
  note("completed", static_cast<std::int64_t>(done.token), done.rc);
  Job& job = known(done.token, "completion");
  check(job.state != Job::State::Handed,
        named("the completion came before the submission", done.token));
  check(job.state == Job::State::Flying, named("a completion too many", done.token));
  --flying_;
  ++totals_.completed;
  const bool killed = done.rc == kUnavailable && world_.reset_scope == "device" && resets_ > job.resets;
  judge_times(job, done, killed);
  judge_stages(job, done, killed);
  check(done.output_bytes == job.output_bytes, named("output size", done.token));
  check(job.slot->inputs_as_loaded(), named("the card wrote to the inputs", done.token));

  bool holds = true;  // the KV then has what the job brought
  const bool failed = done.rc != 0 || done.exception != 0;
  if (failed) {
    holds = judge_failure(job, done, killed);
    failure_seen_ = true;
    if (!shut_) surely_failed_ = true;
  }
  job.came_back = !killed;
  job.done = done;
  const auto found = sequences_.find(job.sequence);
  if (found != sequences_.end()) {
    std::vector<std::int32_t>& history = found->second.history;
    if (holds) history.insert(history.end(), job.tokens.begin(), job.tokens.end());
    if (!failed) judge_output(job, history);
  }
  give_back(job);
  const bool lost = killed || (failed && world_.kv_after == "unknown" && world_.tokens);
  if (!lost || found == sequences_.end()) return;
  if (!resetting_) release(job.sequence);
  sequences_.erase(found);
}

// Whether the KV holds the job all the same.
bool Driver::judge_failure(Job& job, const caltrio_completion& done, bool killed) {
  if (killed) {
    check(done.exception == 1, named("the status after a reset", done.token));
    ++totals_.killed;
    return false;
  }
  ++totals_.failed;
  if (done.exception != 0)
    check(++struck_["exception"] <= world_.most("exception"),
          "more exceptions than the card was told to have");
  if (done.rc != 0) {
    bool asked = false;
    for (const Fault& fault : world_.faults)
      asked =
          asked || (fault.point == "wait" && done.rc == (fault.code != 0 ? fault.code : kWaitFailed));
    check(asked,
          named("Wait()", job.token) + " returned " + std::to_string(done.rc) + " for no reason");
    check(++struck_["wait"] <= world_.most("wait"),
          "Wait() failed more often than the card was told to");
  }
  return world_.kv_after == "applied";
}

void Driver::judge_output(const Job& job, const std::vector<std::int32_t>& history) {
  if (!world_.tokens) {
    check(job.slot->output_untouched(),
          named("a card that computes nothing wrote the output", job.token));
    return;
  }
  const Graph& graph = world_.graphs[job.slot->graph];
  const auto vocab = static_cast<std::size_t>(world_.vocab),
             tile = static_cast<std::size_t>(world_.tile), rows = static_cast<std::size_t>(graph.rows);
  const std::vector<std::uint16_t> right = reference_logits(vocab, history);
  for (std::size_t entry = 0; entry < vocab; ++entry) {
    // One row is as it is; of several the last counts, and each tile has its part of all of them.
    const std::size_t place =
        rows == 1 ? entry : (entry / tile * rows + rows - 1) * tile + entry % tile;
    const std::uint16_t got = job.slot->logits[place];
    if (got == right[entry]) continue;
    const bool injected = got == kNaN && entry == vocab - 1 && ++struck_["nan"] <= world_.most("nan");
    if (!injected)
      fail(named("logit", job.token) + ", entry " + std::to_string(entry) + ", is " +
           std::to_string(got) + ", expected " + std::to_string(right[entry]));
  }
  ++totals_.exact;
}

void Driver::judge_times(const Job& job, const caltrio_completion& done, bool killed) const {
  const bool ordered = job.handed_ns <= done.infer_ns && done.infer_ns <= done.submitted_ns &&
                       done.submitted_ns <= done.waited_ns && done.waited_ns <= now_ns();
  check(ordered, named("the times of the calls", done.token));
  if (!killed && world_.jitter.empty())
    check(done.submitted_ns - done.infer_ns >= world_.submit_ns,
          named("the time of infer()", done.token));
}

void Driver::judge_stages(const Job& job, const caltrio_completion& done, bool killed) const {
  std::vector<Ns> times{done.h2d_start_ns, done.h2d_end_ns};
  check(done.dies >= 0 && done.dies <= 8, named("the number of compute stages", done.token));
  for (int die = 0; die < done.dies; ++die) {
    times.push_back(done.die_start_ns[die]);
    times.push_back(done.die_end_ns[die]);
  }
  times.push_back(done.d2h_start_ns);
  times.push_back(done.d2h_end_ns);
  if (!world_.reports) {
    const bool none = done.dies == 0 && done.engine == -1 &&
                      std::all_of(times.begin(), times.end(), [](Ns each) { return each == -1; });
    check(none, named("stage times of a card that reports none", done.token));
    return;
  }
  check(
      done.engine >= 0 && done.engine < world_.engines && (job.engine < 0 || job.engine == done.engine),
      named("the engine", done.token));
  if (killed) {  // as far as it came
    times.erase(std::remove(times.begin(), times.end(), -1), times.end());
  } else {
    expect(done.dies, static_cast<int>(world_.compute_stages.size()),
           named("compute stages", done.token));
    if (world_.jitter.empty())
      check(done.waited_ns >= done.d2h_end_ns + world_.interrupt_ns,
            named("the interrupt", done.token));
  }
  if (!killed && world_.jitter.empty()) judge_durations(job, done);
  times.insert(times.begin(), done.infer_ns + (world_.jitter.empty() ? world_.submit_ns : 0));
  times.push_back(done.waited_ns);
  check(std::is_sorted(times.begin(), times.end()), named("stages out of order", done.token));
}

// To the nanosecond what the card file says; longer where jobs share a die.
void Driver::judge_durations(const Job& job, const caltrio_completion& done) const {
  const auto transfer_ns = [](std::uint64_t bytes, Ns latency_ns, std::int64_t bytes_per_s) {
    const std::uint64_t rate = static_cast<std::uint64_t>(bytes_per_s);
    return latency_ns + static_cast<Ns>((bytes * 1'000'000'000 + rate - 1) / rate);
  };
  const std::uint64_t input_bytes = 2 * sizeof(std::int32_t) * job.tokens.size();
  check(done.h2d_end_ns - done.h2d_start_ns ==
            transfer_ns(input_bytes, world_.h2d_ns, world_.h2d_bytes_per_s),
        named("the time of H2D", done.token));
  check(done.d2h_end_ns - done.d2h_start_ns ==
            transfer_ns(job.output_bytes, world_.d2h_ns, world_.d2h_bytes_per_s),
        named("the time of D2H", done.token));
  const Ns all_ns =
      world_.compute_ns + (static_cast<Ns>(job.tokens.size()) * world_.per_token_ps + 999) / 1000;
  std::int64_t before = 0;
  for (int die = 0; die < done.dies; ++die) {
    const std::int64_t after = before + world_.compute_stages[static_cast<std::size_t>(die)];
    const Ns least_ns = all_ns * after / 1000 - all_ns * before / 1000;
    const Ns took_ns = done.die_end_ns[die] - done.die_start_ns[die];
    check(world_.compute_sharing.size() > 1 ? took_ns >= least_ns : took_ns == least_ns,
          named("the time of a compute stage", done.token));
    before = after;
  }
}

}  // namespace stress

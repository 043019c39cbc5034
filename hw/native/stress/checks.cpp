// What must hold of all the times of one loop together.
#include <algorithm>

#include "driver.hpp"

namespace stress {
namespace {

struct Interval {
  Ns from, to;
  std::uint64_t token;
};

void check_one_at_a_time(std::vector<Interval> intervals, const std::string& unit) {
  std::sort(intervals.begin(), intervals.end(), [](const Interval& a, const Interval& b) {
    return a.from != b.from ? a.from < b.from : a.to < b.to;
  });
  for (std::size_t index = 1; index < intervals.size(); ++index)
    if (intervals[index].from < intervals[index - 1].to)
      fail("jobs " + std::to_string(intervals[index - 1].token) + " and " +
           std::to_string(intervals[index].token) + " were on " + unit + " together");
}

}  // namespace

void Driver::check_intervals() const {
  check_in_flight();
  for (int generation = 1; generation <= generation_; ++generation) check_units(generation);
}

// When infer() was called no more jobs were in flight, this one included, than some limit that held
// between the job's submit and then.
void Driver::check_in_flight() const {
  for (const auto& [token, job] : jobs_) {
    if (job.done.infer_ns == 0) continue;
    int together = 0;
    for (const auto& [other, each] : jobs_)
      together += each.done.infer_ns != 0 && each.done.infer_ns <= job.done.infer_ns &&
                  job.done.infer_ns < each.done.waited_ns;
    const int allowed = limit_between(job.handed_ns, job.done.infer_ns);
    if (together > allowed)
      fail(std::to_string(together) + " jobs in flight at the infer() of job " + std::to_string(token) +
           ", the limit was " + std::to_string(allowed));
  }
}

// The units of the card serve one job at a time, unless they share; engines too.
void Driver::check_units(int generation) const {
  if (!world_.reports) return;
  std::vector<Interval> h2d, d2h, whole;
  std::vector<std::vector<Interval>> dies(world_.compute_stages.size()),
      engines(static_cast<std::size_t>(world_.engines));
  for (const auto& [token, job] : jobs_) {
    if (!job.came_back || job.generation != generation) continue;
    const caltrio_completion& done = job.done;
    h2d.push_back({done.h2d_start_ns, done.h2d_end_ns, token});
    d2h.push_back({done.d2h_start_ns, done.d2h_end_ns, token});
    whole.push_back({done.h2d_start_ns, done.d2h_end_ns, token});
    for (std::size_t die = 0; die < dies.size(); ++die)
      dies[die].push_back({done.die_start_ns[die], done.die_end_ns[die], token});
    const Ns released = world_.slot_release == "h2d"       ? done.h2d_end_ns
                        : world_.slot_release == "compute" ? done.die_end_ns[dies.size() - 1]
                        : world_.slot_release == "d2h"     ? done.d2h_end_ns
                        : world_.jitter.empty()            ? done.d2h_end_ns + world_.interrupt_ns
                                                           : done.d2h_end_ns;
    engines[static_cast<std::size_t>(done.engine)].push_back({done.h2d_start_ns, released, token});
  }
  if (!world_.full_duplex) h2d.insert(h2d.end(), d2h.begin(), d2h.end());
  check_one_at_a_time(h2d, "H2D");
  check_one_at_a_time(d2h, "D2H");
  if (!world_.overlap) check_one_at_a_time(whole, "the card");
  for (const auto& each : engines) check_one_at_a_time(each, "an engine");
  if (world_.compute_sharing.size() > 1) return;
  for (const auto& each : dies) check_one_at_a_time(each, "a die");
}

}  // namespace stress

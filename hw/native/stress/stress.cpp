// Random lives of the shim on the emulator, through the C ABI alone, for the sanitizers.
//
//   stress LOOPS SEED [FIRST]   so many loops, the first of them number FIRST (0)
//
// Each loop is a pure choice of (SEED, number); what threads and clock make of it is not.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "driver.hpp"

namespace stress {
namespace {

std::string folder;

// A card that hangs for ever gives its jobs back to nobody: the reset says so, and the threads stay. In
// a process of its own, which ends without a look at what leaks.
void hang_for_ever() {
  const pid_t child = fork();
  if (child == 0) {
    Random random(1);
    World world(random, End::Clean);
    world.faults.clear();
    world.faults.push_back({"hang_for_ever", 0, 0, 0, 1, 0});
    world.reset_scope = "device";
    const std::string calbin = folder + "/for_ever.calbin";
    world.write(calbin);
    std::int32_t code = -1;
    caltrio_device* device = caltrio_open(calbin.c_str(), &code);
    if (device == nullptr || caltrio_configure(device, 0) != 0) leave(2);
    const Graph& graph = world.graphs[1];
    caltrio_buffers* buffers = caltrio_buffers_new(device, graph.name.c_str());
    Slot slot(world, 1);
    if (caltrio_map_input(buffers, graph.tokens.c_str(), slot.tokens.get(), 4) != 0 ||
        caltrio_map_input(buffers, graph.position.c_str(), slot.positions.get(), 4) != 0 ||
        caltrio_map_output(buffers, graph.logits.c_str(), slot.logits.get(), slot.entries * 2) != 0)
      leave(3);
    caltrio_submission out{};
    caltrio_completion done{};
    std::int32_t submitted = 0, completed = 0;
    if (caltrio_submit(device, buffers, 1, -1, 1) != 0) leave(4);
    while (submitted == 0) caltrio_drain(device, &out, &submitted, &done, &completed, 1);
    if (out.rc != 0) leave(4);
    if (caltrio_reset(device, 20'000'000) != 25) leave(5);
    if (caltrio_begin_reset(device, 500'000'000) != 0) leave(8);
    if (caltrio_ended(device, &code) != 0 || caltrio_begin_configure(device, 0) != 17) leave(9);
    caltrio_stop(device);
    while (!caltrio_ended(device, &code)) usleep(1'000);
    if (code != 25) leave(10);
    if (caltrio_stopped(device) != 0) leave(6);
    if (caltrio_drain(device, &out, &submitted, &done, &completed, 1) != 0) leave(7);
    leave(0);
  }
  int status = -1;
  if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
    fail("the card that hangs for ever: status " + std::to_string(status));
}

// A file that cannot be used leaves neither threads nor memory.
void bad_files() {
  std::int32_t code = 0;
  if (caltrio_open((folder + "/no.calbin").c_str(), &code) != nullptr || code != 10)
    fail("a calbin that is not there gave code " + std::to_string(code));
  std::ofstream(folder + "/bad.calbin") << "calbin 1\nnonsense\n";
  if (caltrio_open((folder + "/bad.calbin").c_str(), &code) != nullptr || code != 12)
    fail("a damaged calbin gave code " + std::to_string(code));
}

std::ptrdiff_t open_files() {
  std::filesystem::directory_iterator files("/proc/self/fd");
  return std::distance(begin(files), end(files));
}

void loop(std::uint64_t seed, std::int64_t number, Totals& totals) {
  Random random(mix64(seed) ^ mix64(static_cast<std::uint64_t>(number)));
  const End end = static_cast<End>(random.between(0, kEnds - 1));
  World world(random, end);
  const std::string calbin = folder + "/model.calbin";
  world.write(calbin);
  Driver driver(world, random, calbin, totals);
  on_failure([&] {
    std::fprintf(stderr, "again: stress 1 %llu %lld\n", static_cast<unsigned long long>(seed),
                 static_cast<long long>(number));
    driver.describe();
  });
  driver.open();
  driver.configure();
  driver.work(random.between(4, 25), end == End::Clean);
  if (end == End::StopInReset && random.percent(50)) {
    driver.abandon_reset();
    driver.check_intervals();
    return;
  }
  if (end == End::ResetFlying || end == End::StopInReset) driver.reset(end == End::StopInReset);
  if (end == End::ResetFlying || end == End::Hang) {
    if (end == End::ResetFlying && !driver.dead()) driver.configure();
    driver.work(random.between(3, 15), random.percent(50));
  }
  driver.close();
  driver.check_intervals();
}

int all(std::int64_t loops, std::uint64_t seed, std::int64_t first) {
  std::printf("stress: %lld loops, seed %llu\n", static_cast<long long>(loops),
              static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  char made[] = "/tmp/caltrio-stress-XXXXXX";
  if (mkdtemp(made) == nullptr) fail("no folder for the files");
  folder = made;
  hang_for_ever();  // before this process has threads
  start_watching();
  bad_files();
  Totals totals;
  const Ns begun = now_ns();
  const std::ptrdiff_t open = open_files();
  std::pair<Ns, std::int64_t> slowest{0, first};
  for (std::int64_t number = first; number < first + loops; ++number) {
    const Ns before = now_ns();
    loop(seed, number, totals);
    slowest = std::max(slowest, {now_ns() - before, number});
  }
  on_failure({});
  if (open_files() != open) fail("a file that was opened was never closed");
  stop_watching();
  for (const char* name : {"model.calbin", "bad.calbin", "for_ever.calbin"})
    for (const char* end : {"", ".card"}) unlink((folder + "/" + name + end).c_str());
  rmdir(made);
  const std::pair<const char*, std::int64_t> counts[] = {
      {"submitted", totals.submitted},
      {"completed", totals.completed},
      {"with exact logits", totals.exact},
      {"withdrawn", totals.withdrawn},
      {"refused", totals.refused},
      {"failed", totals.failed},
      {"killed by a reset", totals.killed},
      {"resets", totals.resets},
      {"hangs", totals.hangs},
      {"held after a failure", totals.held},
      {"bursts", totals.bursts},
      {"ring full", totals.full},
      {"past the ring", totals.direct},
      {"let go by a higher limit", totals.raised},
      {"abandoned in a reset", totals.abandoned},
      {"stopped while jobs flew", totals.stopped_flying}};
  std::string text = "stress: no fault found in " + std::to_string((now_ns() - begun) / 1'000'000) +
                     " ms, loop " + std::to_string(slowest.second) + " alone took " +
                     std::to_string(slowest.first / 1'000'000) + " ms";
  for (const auto& [name, count] : counts) {
    text += std::string(", ") + name + " " + std::to_string(count);
    if (count == 0 && loops >= 1000)
      fail(std::string("nothing was ever ") + name + ": the run tests less than it says");
  }
  std::printf("%s\n", text.c_str());
  return 0;
}

}  // namespace
}  // namespace stress

int main(int count, char** words) {
  if (count != 3 && count != 4) {
    std::fprintf(stderr, "usage: stress LOOPS SEED [FIRST]\n");
    return 2;
  }
  return stress::all(std::atoll(words[1]), std::strtoull(words[2], nullptr, 10),
                     count == 4 ? std::atoll(words[3]) : 0);
}

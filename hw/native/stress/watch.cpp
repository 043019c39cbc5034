#include "watch.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

namespace stress {
namespace {

std::function<void()> describe_loop;
std::atomic<const char*> watched_call{nullptr};
std::atomic<Ns> watched_since{0};
std::atomic<bool> watching{false};
std::thread watcher;

void watch() {
  while (watching) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const char* call = watched_call;
    if (call == nullptr || now_ns() - watched_since < 2 * kDeadlineNs) continue;
    // The driver may hold anything: its state is not looked at.
    std::fprintf(stderr, "stress: FAILED: %s did not return\n", call);
    leave(1);
  }
}

}  // namespace

Ns now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void leave(int status) {
  syscall(SYS_exit_group, status);
  __builtin_unreachable();
}

void fail(const std::string& what) {
  std::fprintf(stderr, "stress: FAILED: %s\n", what.c_str());
  if (describe_loop) describe_loop();
  leave(1);
}

void on_failure(std::function<void()> describe) { describe_loop = std::move(describe); }

Watched::Watched(const char* what) {
  watched_since = now_ns();
  watched_call = what;
}

Watched::~Watched() { watched_call = nullptr; }

void start_watching() {
  watching = true;
  watcher = std::thread(watch);
}

void stop_watching() {
  watching = false;
  watcher.join();
}

}  // namespace stress

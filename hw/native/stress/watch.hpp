// How a run ends badly: what was waited for or found wrong is printed, and the process ends. A thread
// of its own ends it too if the driver does not come back from a call in time.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace stress {

using Ns = std::int64_t;

Ns now_ns();

inline constexpr Ns kDeadlineNs = 30'000'000'000;  // of each wait

// Ends the process at once, past whatever a sanitizer thinks of the threads that are left.
[[noreturn]] void leave(int status);
// Prints, with what `describe` tells of the loop, and ends the process with status 1.
[[noreturn]] void fail(const std::string& what);
// Of the loop that runs; called by fail() alone.
void on_failure(std::function<void()> describe);

// While one of these lives the driver is in a call that must come back within twice the deadline of a
// wait; `what` must outlive it.
class Watched {
 public:
  explicit Watched(const char* what);
  ~Watched();
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;
};

void start_watching();
void stop_watching();

}  // namespace stress

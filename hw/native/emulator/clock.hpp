// CLOCK_MONOTONIC in nanoseconds, and sleeping to an instant with a final spin.
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

namespace emulator {

using Ns = std::int64_t;
using Clock = std::chrono::steady_clock;

// A sleep wakes late by the timer's slack and a context switch; the rest is spun.
inline constexpr Ns kSpinNs = 60'000;

inline Ns now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

inline Clock::time_point at(Ns ns) { return Clock::time_point(std::chrono::nanoseconds(ns)); }

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

inline void spin_until(Ns due) {
  while (now_ns() < due) relax();
}

inline void sleep_until(Ns due) {
  if (due - now_ns() > kSpinNs) std::this_thread::sleep_until(at(due - kSpinNs));
  spin_until(due);
}

}  // namespace emulator

// Seeded random choices, the same on every machine: a sequence of SplitMix64.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace stress {

// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
inline std::uint64_t mix64(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15u;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits() {
    const std::uint64_t drawn = mix64(state_);
    state_ += 0x9E3779B97F4A7C15u;
    return drawn;
  }
  // Both ends are among them.
  std::int64_t between(std::int64_t least, std::int64_t most) {
    return least + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(most - least + 1));
  }
  bool percent(int chance) { return between(0, 99) < chance; }
  template <typename T>
  T one_of(std::initializer_list<T> choices) {
    return choices.begin()[between(0, static_cast<std::int64_t>(choices.size()) - 1)];
  }

 private:
  std::uint64_t state_;
};

}  // namespace stress

#include "reference.hpp"

#include <cstring>

#include "random.hpp"

namespace stress {
namespace {

std::uint16_t bf16(double value) {  // all values of the model are exact
  const float single = static_cast<float>(value);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &single, sizeof bits);
  return static_cast<std::uint16_t>(bits >> 16);
}

}  // namespace

std::vector<std::uint16_t> reference_logits(std::size_t vocab,
                                            const std::vector<std::int32_t>& history) {
  // sum((t[i] + 1) * M**i), by Horner's rule from the last token.
  std::uint64_t digest = 0;
  for (auto token = history.rbegin(); token != history.rend(); ++token)
    digest = digest * 0x9E3779B97F4A7C15u + static_cast<std::uint64_t>(std::int64_t{*token} + 1);
  const std::uint64_t x = mix64(digest ^ history.size());

  std::vector<std::uint16_t> made(vocab);
  const std::uint64_t turn = mix64(x ^ 1) % vocab;
  for (std::uint64_t entry = 0; entry < vocab; ++entry)
    made[entry] = bf16(static_cast<double>(mix64((entry + turn) % vocab) & 255) / 16 - 8);
  std::vector<std::uint64_t> chain{x};
  while (chain.size() < 5) chain.push_back(mix64(chain.back()));
  for (std::size_t rank = 5; rank-- > 0;)  // 24 is written last
    made[chain[rank] % vocab] = bf16(24.0 - static_cast<double>(rank));
  return made;
}

}  // namespace stress

// The token model once more, after the definition in caltrio/tokens.py: what the card must answer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace stress {

// BF16 bits [vocab] of the logits after that history.
std::vector<std::uint16_t> reference_logits(std::size_t vocab,
                                            const std::vector<std::int32_t>& history);

}  // namespace stress

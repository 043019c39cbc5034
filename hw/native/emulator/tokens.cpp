#include "tokens.hpp"

#include <algorithm>
#include <array>
#include <cstring>

namespace emulator {
namespace {

constexpr std::uint64_t kMultiplier = 0x9E3779B97F4A7C15u;
constexpr std::array<float, 5> kTop{24.0f, 23.0f, 22.0f, 21.0f, 20.0f};
constexpr std::int64_t kMostCells = 1 << 20;  // of one sequence, whatever a CSR says

// The upper half of the FP32 bits: exact for the values of this model.
std::uint16_t bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>(bits >> 16);
}

}  // namespace

// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
std::uint64_t mix64(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15u;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

bool Kv::can_allocate(std::uint32_t sequences) const {
  return capacity_ == 0 || used_ + sequences <= capacity_;
}

bool Kv::apply(calrt::KvSeqId sequence, std::int64_t target) {
  Held& held = held_[sequence];
  const std::int64_t more = std::max<std::int64_t>(target - held.allowed, 0);
  if (capacity_ != 0 && used_ + more > capacity_) return false;
  used_ += more;
  held.allowed = std::max(held.allowed, target);
  return true;
}

void Kv::release(calrt::KvSeqId sequence) {
  const auto found = held_.find(sequence);
  if (found == held_.end()) return;
  used_ -= found->second.allowed;
  held_.erase(found);
}

TokenModel::TokenModel(std::size_t vocab) : vocab_(vocab), noise_(2 * vocab) {
  std::array<std::uint16_t, 256> steps;
  for (std::size_t step = 0; step < steps.size(); ++step)
    steps[step] = bf16(static_cast<float>(step) / 16.0f - 8.0f);
  for (std::size_t entry = 0; entry < vocab; ++entry)
    noise_[entry] = noise_[entry + vocab] = steps[mix64(entry) & 255];
}

void TokenModel::run(Kv& kv, Transfer& job, std::uint16_t* output, std::size_t rows,
                     std::size_t tile_d0) {
  Kv::Held& held = kv.of(job.sequence);
  const std::int64_t total = std::clamp<std::int64_t>(job.total_len, 0, kMostCells);
  const std::int64_t room = std::max(total, std::min(held.allowed, kMostCells));
  if (static_cast<std::int64_t>(held.cells.size()) < room)
    held.cells.resize(static_cast<std::size_t>(room), -1);
  // Written where the CSR and the position agree, inside what Apply() allowed; else lost.
  for (std::size_t index = 0; index < job.tokens.size() && index < job.positions.size(); ++index) {
    const std::int64_t cell = job.cur_len + static_cast<std::int64_t>(index);
    if (job.positions[index] != cell || cell < 0 || cell >= held.allowed || cell >= room) continue;
    std::int64_t& place = held.cells[static_cast<std::size_t>(cell)];
    job.before.emplace_back(cell, place);
    place = job.tokens[index];
  }
  const std::size_t count = static_cast<std::size_t>(total);
  if (rows == 1) {
    logits(held.cells, count, output);
    return;
  }
  std::vector<std::uint16_t> row(vocab_);
  logits(held.cells, count, row.data());
  for (std::size_t tile = 0; tile < vocab_ / tile_d0; ++tile)
    std::copy_n(row.begin() + static_cast<std::ptrdiff_t>(tile * tile_d0), tile_d0,
                output + (tile * rows + rows - 1) * tile_d0);
}

void TokenModel::logits(const std::vector<std::int64_t>& cells, std::size_t count,
                        std::uint16_t* row) const {
  std::uint64_t digest = 0, power = 1;
  for (std::size_t index = 0; index < count; ++index) {
    digest += static_cast<std::uint64_t>(cells[index] + 1) * power;
    power *= kMultiplier;
  }
  std::uint64_t x = mix64(digest ^ count);
  std::memcpy(row, noise_.data() + mix64(x ^ 1) % vocab_, vocab_ * sizeof *row);
  std::array<std::size_t, kTop.size()> places;
  for (std::size_t& place : places) {
    place = x % vocab_;
    x = mix64(x);
  }
  for (std::size_t rank = kTop.size(); rank-- > 0;)  // the likeliest last: it wins a coincidence
    row[places[rank]] = bf16(kTop[rank]);
}

void TokenModel::failed(Kv& kv, const Transfer& job, KvAfter after) {
  if (after == KvAfter::Applied) return;
  std::vector<std::int64_t>& cells = kv.of(job.sequence).cells;
  for (const auto& [cell, value] : job.before) {
    if (static_cast<std::size_t>(cell) >= cells.size()) continue;
    std::int64_t& place = cells[static_cast<std::size_t>(cell)];
    place = after == KvAfter::Unchanged ? value : place ^ 0x5555;  // else neither old nor new
  }
}

}  // namespace emulator

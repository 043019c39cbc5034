// KV and the functional token model on the card: the definition of caltrio.tokens, on its own memory.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "card_file.hpp"

namespace emulator {

// What H2D brought of one job, and how to take its KV update back.
struct Transfer {
  calrt::KvSeqId sequence = 0;
  std::int64_t cur_len = 0, total_len = 0;  // the CSRs at submit: tokens before the job and after
  std::vector<std::int32_t> tokens, positions;
  std::vector<std::pair<std::int64_t, std::int64_t>> before;  // (cell, what it held)
};

class Kv {
 public:
  explicit Kv(std::int64_t capacity_tokens = 0) : capacity_(capacity_tokens) {}
  bool can_allocate(std::uint32_t sequences) const;
  bool apply(calrt::KvSeqId sequence, std::int64_t target);
  void release(calrt::KvSeqId sequence);

  struct Held {
    std::int64_t allowed = 0;
    std::vector<std::int64_t> cells;  // -1 where nothing was written
  };
  Held& of(calrt::KvSeqId sequence) { return held_[sequence]; }

 private:
  std::int64_t capacity_, used_ = 0;
  std::unordered_map<calrt::KvSeqId, Held> held_;
};

class TokenModel {
 public:
  explicit TokenModel(std::size_t vocab);
  // The KV grows by the job, and its logits are written: `rows` of them in tiles of `tile_d0`, of
  // which the last row is the answer.
  void run(Kv& kv, Transfer& job, std::uint16_t* output, std::size_t rows, std::size_t tile_d0);
  // The job is to have failed: its KV becomes what the hypothesis says.
  static void failed(Kv& kv, const Transfer& job, KvAfter after);

 private:
  void logits(const std::vector<std::int64_t>& cells, std::size_t count, std::uint16_t* row) const;
  std::size_t vocab_;
  std::vector<std::uint16_t> noise_;  // twice in a row: a turned one is one copy
};

std::uint64_t mix64(std::uint64_t value);

}  // namespace emulator

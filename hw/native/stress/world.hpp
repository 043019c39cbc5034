// One random card and its model: what is written into calbin and card file, and what the driver has to
// know of it to judge what it sees.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "random.hpp"

namespace stress {

// How a loop ends.
enum class End { Clean, StopFlying, ResetFlying, Hang, StopInReset };
inline constexpr int kEnds = 5;

struct Fault {
  std::string point;
  int code = 0;  // 0: what the card takes by itself
  std::int64_t at = -1, every = 0, times = 1;
  std::int64_t struck = 0;
};

struct Graph {
  std::string name, tokens, position, logits;
  std::int64_t positions, rows;  // tokens of one job at most; rows of logits
};

struct World {
  World(Random& random, End end);
  void write(const std::string& calbin) const;
  std::string calbin_text() const;
  std::string card_text() const;

  bool has(const std::string& point) const;
  // How often these faults can strike, all together.
  std::int64_t most(const std::string& point) const;
  bool may_hang() const { return has("hang") || has("hang_infer"); }
  // The next call at a point that only the driver's thread comes to: the code that it must return, or
  // -1 for no fault.
  int strike(const std::string& point, int usual_code);

  End end;
  std::vector<Graph> graphs;          // prefill, decode
  std::int64_t vocab, tile, longest;  // entries; of a tile of logits; tokens of a sequence
  int engines;
  bool overlap, full_duplex, issue_order, compute_idle, any_order, blocks, reports, tokens;
  std::vector<int> compute_stages, compute_sharing;
  std::string slot_release, kv_after, reset_scope;
  std::int64_t submit_ns, interrupt_ns, reset_ns, h2d_ns, d2h_ns, compute_ns, per_token_ps;
  std::int64_t h2d_bytes_per_s, d2h_bytes_per_s, kv_tokens;
  std::string jitter;  // empty: none
  std::vector<Fault> faults;

 private:
  std::map<std::string, std::int64_t> calls_;
};

}  // namespace stress

// The units of the card and the jobs on them, as events in the card's own time.
//
// Events happen at exact instants, whenever the card's thread gets round to them, and each follows
// from the instant of its cause: a thread that wakes late makes nothing else late.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <queue>
#include <utility>
#include <vector>

#include "card_file.hpp"
#include "clock.hpp"

namespace emulator {

class Timeline {
 public:
  Ns now() const { return now_; }
  Ns next() const { return events_.empty() ? -1 : events_.top().at; }
  void after(Ns delay, std::function<void()> act) {
    events_.push({now_ + delay, order_++, std::move(act)});
  }
  // Something came from outside, at the instant `ns`.
  void set(Ns ns) { now_ = std::max(now_, ns); }
  // Do everything that is due at `ns`.
  void run(Ns ns) {
    while (!events_.empty() && events_.top().at <= ns) {
      Event event = events_.top();
      events_.pop();
      now_ = event.at;
      event.act();
    }
  }

 private:
  struct Event {
    Ns at;
    std::uint64_t order;
    std::function<void()> act;
    bool operator<(const Event& other) const {
      return at != other.at ? at > other.at : order > other.order;
    }
  };
  Ns now_ = 0;
  std::uint64_t order_ = 0;
  std::priority_queue<Event> events_;
};

// One job's use of one unit.
struct Turn {
  Ns duration = 0;
  std::function<void()> on_start, on_end;
  Ns start = -1;
  bool joined = false, ready = false;
  Ns remaining = 0;  // thousandths of a ns; of a shared unit
};
using TurnPtr = std::shared_ptr<Turn>;

class Unit {
 public:
  virtual ~Unit() = default;
  virtual void serve(const TurnPtr& turn) = 0;
};

// Serves one turn at a time, in the order in which they joined; one that has joined and is not ready
// holds up those behind it.
class Channel : public Unit {
 public:
  explicit Channel(Timeline& time) : time_(time) {}
  void join(const TurnPtr& turn);
  void serve(const TurnPtr& turn) override;

 private:
  void next();
  Timeline& time_;
  std::deque<TurnPtr> queue_;
  bool busy_ = false;
};

// Serves several turns at once, each at the speed that so many of them leave to it.
class SharedUnit : public Unit {
 public:
  SharedUnit(Timeline& time, std::vector<int> speeds) : time_(time), speeds_(std::move(speeds)) {}
  void serve(const TurnPtr& turn) override;

 private:
  void progress();
  void refill();
  void ends(const TurnPtr& turn, std::uint64_t version);
  Timeline& time_;
  std::vector<int> speeds_;
  std::deque<TurnPtr> queue_;
  std::vector<TurnPtr> running_;
  Ns since_ = 0;
  std::uint64_t version_ = 0;
};

// What a job needs of the engine, and what becomes of it there.
struct Flight {
  Ns h2d_ns = 0, compute_ns = 0, d2h_ns = 0;
  int slot = -1;
  calrt::StageTimes times;
  std::function<void()> on_read;     // as H2D has ended,
  std::function<void(Ns)> on_write;  // as D2H begins, which will end at that instant,
  std::function<void()> on_written;  // and as it has ended
};

class Engine {
 public:
  explicit Engine(const CardFile& card);
  int free_slot(int wanted) const;
  void release_slot(int slot);
  // Has a slot come free since the last time this was asked?
  bool take_freed() { return std::exchange(freed_, false); }
  void start(const std::shared_ptr<Flight>& flight, int slot);
  Timeline time;

 private:
  void compute(const std::shared_ptr<Flight>& flight, const TurnPtr& d2h, std::size_t die);
  void computed(const std::shared_ptr<Flight>& flight, const TurnPtr& d2h);
  void store(const std::shared_ptr<Flight>& flight);

  const CardFile& card_;
  std::shared_ptr<Channel> h2d_, d2h_;
  std::vector<std::unique_ptr<Unit>> dies_;
  std::vector<bool> free_;
  bool freed_ = false;
  std::deque<std::function<void()>> want_whole_;  // where jobs do not overlap
  bool whole_taken_ = false;
  int computes_queued_ = 0;
  std::deque<TurnPtr> held_;  // D2H that wait for computes to drain
};

}  // namespace emulator

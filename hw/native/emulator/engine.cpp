#include "engine.hpp"

#include <algorithm>

namespace emulator {

void Channel::join(const TurnPtr& turn) {
  turn->joined = true;
  queue_.push_back(turn);
}

void Channel::serve(const TurnPtr& turn) {
  if (!turn->joined) join(turn);
  turn->ready = true;
  next();
}

void Channel::next() {
  if (busy_ || queue_.empty() || !queue_.front()->ready) return;
  const TurnPtr turn = queue_.front();
  queue_.pop_front();
  busy_ = true;
  turn->start = time_.now();
  if (turn->on_start) turn->on_start();
  time_.after(turn->duration, [this, turn] {
    busy_ = false;
    next();  // whoever queues already comes before whoever joins at this instant
    turn->on_end();
  });
}

void SharedUnit::serve(const TurnPtr& turn) {
  progress();
  turn->remaining = turn->duration * 1000;
  queue_.push_back(turn);
  refill();
}

void SharedUnit::progress() {
  if (!running_.empty()) {
    const Ns done = (time_.now() - since_) * speeds_[running_.size() - 1];
    for (const TurnPtr& turn : running_) turn->remaining -= done;
  }
  since_ = time_.now();
}

void SharedUnit::refill() {
  while (!queue_.empty() && running_.size() < speeds_.size()) {
    running_.push_back(queue_.front());
    queue_.pop_front();
    running_.back()->start = time_.now();
  }
  const std::uint64_t version = ++version_;  // any end foreseen before is void
  if (running_.empty()) return;
  const TurnPtr first =
      *std::min_element(running_.begin(), running_.end(), [](const TurnPtr& a, const TurnPtr& b) {
        return a->remaining < b->remaining;
      });
  const Ns speed = speeds_[running_.size() - 1];
  const Ns after = std::max<Ns>((first->remaining + speed - 1) / speed, 0);
  time_.after(after, [this, first, version] { ends(first, version); });
}

void SharedUnit::ends(const TurnPtr& turn, std::uint64_t version) {
  if (version != version_) return;
  progress();
  running_.erase(std::find(running_.begin(), running_.end(), turn));
  refill();
  turn->on_end();
}

Engine::Engine(const CardFile& card) : card_(card), free_(static_cast<std::size_t>(card.engines), true) {
  h2d_ = std::make_shared<Channel>(time);
  d2h_ = card.full_duplex ? std::make_shared<Channel>(time) : h2d_;
  for (std::size_t die = 0; die < card.compute_stages.size(); ++die) {
    if (card.compute_sharing.size() == 1)
      dies_.push_back(std::make_unique<Channel>(time));
    else
      dies_.push_back(std::make_unique<SharedUnit>(time, card.compute_sharing));
  }
}

int Engine::free_slot(int wanted) const {
  if (wanted >= 0)
    return wanted < static_cast<int>(free_.size()) && free_[static_cast<std::size_t>(wanted)]
               ? wanted
               : -1;
  const auto found = std::find(free_.begin(), free_.end(), true);
  return found == free_.end() ? -1 : static_cast<int>(found - free_.begin());
}

void Engine::release_slot(int slot) {
  free_[static_cast<std::size_t>(slot)] = true;
  freed_ = true;
}

void Engine::start(const std::shared_ptr<Flight>& flight, int slot) {
  free_[static_cast<std::size_t>(slot)] = false;
  flight->slot = flight->times.engine = slot;
  const auto h2d = std::make_shared<Turn>(), d2h = std::make_shared<Turn>();
  h2d->duration = flight->h2d_ns;
  d2h->duration = flight->d2h_ns;
  h2d->on_start = [this] { ++computes_queued_; };
  if (card_.dma_order == DmaOrder::Issue) {
    h2d_->join(h2d);
    d2h_->join(d2h);
  }
  h2d->on_end = [this, flight, d2h, h2d = h2d.get()] {
    flight->times.h2d_start = h2d->start;
    flight->times.h2d_end = time.now();
    flight->on_read();
    if (card_.slot_release == SlotRelease::H2d) release_slot(flight->slot);
    compute(flight, d2h, 0);
  };
  d2h->on_start = [this, flight, d2h = d2h.get()] { flight->on_write(time.now() + d2h->duration); };
  d2h->on_end = [this, flight, d2h = d2h.get()] {
    flight->times.d2h_start = d2h->start;
    store(flight);
  };
  const auto begin = [this, h2d] { h2d_->serve(h2d); };
  if (card_.overlap) {
    begin();
  } else if (whole_taken_) {
    want_whole_.push_back(begin);
  } else {
    whole_taken_ = true;
    begin();
  }
}

void Engine::compute(const std::shared_ptr<Flight>& flight, const TurnPtr& d2h, std::size_t die) {
  if (die == dies_.size()) {
    computed(flight, d2h);
    return;
  }
  std::int64_t before = 0;
  for (std::size_t part = 0; part < die; ++part) before += card_.compute_stages[part];
  const auto cut = [&](std::int64_t permille) { return flight->compute_ns * permille / 1000; };
  const auto turn = std::make_shared<Turn>();
  turn->duration = cut(before + card_.compute_stages[die]) - cut(before);
  turn->on_end = [this, flight, d2h, die, turn = turn.get()] {
    flight->times.dies = static_cast<std::int32_t>(die) + 1;
    flight->times.die_start[die] = turn->start;
    flight->times.die_end[die] = time.now();
    compute(flight, d2h, die + 1);
  };
  dies_[die]->serve(turn);
}

void Engine::computed(const std::shared_ptr<Flight>& flight, const TurnPtr& d2h) {
  --computes_queued_;
  if (card_.slot_release == SlotRelease::Compute) release_slot(flight->slot);
  if (card_.completion_signal == Signal::PerJob) {
    d2h_->serve(d2h);
    return;
  }
  held_.push_back(d2h);
  if (computes_queued_ != 0) return;
  std::deque<TurnPtr> due;
  due.swap(held_);
  for (const TurnPtr& turn : due) d2h_->serve(turn);
}

void Engine::store(const std::shared_ptr<Flight>& flight) {
  flight->times.d2h_end = time.now();
  flight->on_written();
  if (!card_.overlap) {
    if (want_whole_.empty()) {
      whole_taken_ = false;
    } else {
      const auto go = want_whole_.front();
      want_whole_.pop_front();
      go();
    }
  }
  if (card_.slot_release == SlotRelease::D2h) release_slot(flight->slot);
}

}  // namespace emulator

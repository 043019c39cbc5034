// The life of one device: open, configure, work, reset, stop.
#include "driver.hpp"

#include <cstdio>
#include <cstring>
#include <thread>

namespace stress {
namespace {

constexpr Ns kHangNs = 25'000'000;  // silence of a card that may hang, before it is reset
constexpr std::size_t kNotes = 40;
constexpr int kAlreadyConfigured = 7, kOutOfRange = 14, kBusy = 17, kUnavailable = 18, kMapBroken = 24,
              kUnsupported = 27, kWrongDirection = 29;

}  // namespace

Slot::Slot(const World& world, std::size_t graph)
    : graph(graph),
      count(static_cast<std::size_t>(world.graphs[graph].positions)),
      entries(static_cast<std::size_t>(world.graphs[graph].rows * world.vocab)) {
  tokens = std::make_unique<std::int32_t[]>(count);
  positions = std::make_unique<std::int32_t[]>(count);
  logits = std::make_unique<std::uint16_t[]>(entries);
}

void Slot::scribble(int value) {
  mark = static_cast<std::uint8_t>(value);
  std::memset(tokens.get(), mark, count * sizeof tokens[0]);
  std::memset(positions.get(), mark, count * sizeof positions[0]);
  std::memset(logits.get(), mark, entries * sizeof logits[0]);
}

bool Slot::output_untouched() const {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(logits.get());
  for (std::size_t index = 0; index < entries * sizeof logits[0]; ++index)
    if (bytes[index] != mark) return false;
  return true;
}

bool Slot::quiet() const {
  const auto all = [this](const std::int32_t* words) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(words);
    for (std::size_t index = 0; index < count * sizeof *words; ++index)
      if (bytes[index] != mark) return false;
    return true;
  };
  return all(tokens.get()) && all(positions.get()) && output_untouched();
}

bool Slot::inputs_as_loaded() const {
  return std::equal(loaded_tokens.begin(), loaded_tokens.end(), tokens.get()) &&
         std::equal(loaded_positions.begin(), loaded_positions.end(), positions.get());
}

Driver::Driver(World& world, Random& random, std::string calbin, Totals& totals)
    : world_(world), random_(random), calbin_(std::move(calbin)), totals_(totals) {}

void Driver::expect(int got, int wanted, const std::string& what) const {
  if (got != wanted)
    fail(what + " returned " + std::to_string(got) + ", expected " + std::to_string(wanted));
}

void Driver::note(const char* what, std::int64_t which, std::int64_t value) {
  notes_.push_back({now_ns(), what, which, value});
  if (notes_.size() > kNotes) notes_.pop_front();
}

void Driver::describe() const {
  std::fprintf(stderr, "waited for: %s; handed over and not reported %d, flying %d, ended %lld\n",
               waiting_for_, unreported_, flying_, static_cast<long long>(over_));
  for (const Note& each : notes_)
    std::fprintf(stderr, "  %+11.3f ms  %s %lld %lld\n", static_cast<double>(each.at - now_ns()) / 1e6,
                 each.what, static_cast<long long>(each.which), static_cast<long long>(each.value));
  for (const auto& [token, job] : jobs_)
    if (job.state != Job::State::Over)
      std::fprintf(stderr, "  job %llu of sequence %d is %s\n", static_cast<unsigned long long>(token),
                   job.sequence, job.state == Job::State::Handed ? "handed over" : "flying");
  std::fprintf(stderr, "%s%s", world_.calbin_text().c_str(), world_.card_text().c_str());
}

void Driver::open() {
  std::int32_t code = -1;
  device_ = caltrio_open(calbin_.c_str(), &code);
  check(device_ != nullptr, "caltrio_open failed with code " + std::to_string(code));
  expect(caltrio_abi(), 1, "caltrio_abi");
  expect(caltrio_model_count(device_), static_cast<int>(world_.graphs.size()), "caltrio_model_count");
  for (int model = 0; model < static_cast<int>(world_.graphs.size()); ++model) {
    const Graph& graph = world_.graphs[static_cast<std::size_t>(model)];
    check(caltrio_model_name(device_, model) == graph.name, "the name of a graph is wrong");
    expect(caltrio_model_tensors(device_, model), 3, "caltrio_model_tensors");
    caltrio_tensor tensor;
    expect(caltrio_model_tensor(device_, model, 2, &tensor), 0, "caltrio_model_tensor");
    check(tensor.name == graph.logits && tensor.rank == 3, "a tensor is described wrongly");
    expect(caltrio_model_tensor(device_, model, 3, &tensor), kOutOfRange, "a fourth tensor");
    const char *key = nullptr, *value = nullptr;
    expect(caltrio_model_metadata(device_, model, 0, &key, &value), 0, "caltrio_model_metadata");
    check(value == std::to_string(world_.tile), "the tile size is wrong");
  }
  no_kv();
  shut_ring();
  limit(static_cast<int>(random_.between(1, 3)));
}

// A ring without a model holds one job back, until that is withdrawn.
void Driver::shut_ring() {
  if (random_.percent(70)) return;
  caltrio_buffers* buffers = caltrio_buffers_new(device_, world_.graphs[0].name.c_str());
  check(buffers != nullptr, "caltrio_buffers_new gave none");
  caltrio_submission submission{};
  expect(caltrio_submit(device_, buffers, 1, -1, 0), 0, "submit before configure");
  expect(caltrio_submit(device_, buffers, 2, -1, 0), kBusy, "a second such submit");
  caltrio_withdraw(device_, 2);
  caltrio_withdraw(device_, 1);
  caltrio_completion completion{};
  std::int32_t submitted = 0, completed = 0;
  expect(caltrio_drain(device_, &submission, &submitted, &completion, &completed, 1), 1, "drain");
  check(submitted == 1 && submission.token == 1 && submission.withdrawn == 1,
        "the withdrawn job's report");
  caltrio_buffers_free(buffers);
}

void Driver::configure() {
  while (true) {
    const bool parallel = random_.percent(50) && (world_.engines > 1 || world_.reset_scope == "device");
    const int fault = world_.strike("configure", 19);
    const int refused = parallel && world_.engines < 2 ? kUnsupported : 0;
    int rc = -1;
    if (random_.percent(50)) {
      expect(caltrio_begin_configure(device_, parallel), 0, "caltrio_begin_configure");
      rc = ended("caltrio_configure", false);
    } else {
      const Watched watched("caltrio_configure");
      rc = caltrio_configure(device_, parallel);
    }
    note("configure", parallel, rc);
    expect(rc, fault >= 0 ? fault : refused, "caltrio_configure");
    if (fault >= 0) continue;
    configured_ = true;
    if (refused == 0) break;
    reset(false);  // the model is loaded, and the ring has not opened
  }
  ++generation_;
  shut_ = failure_seen_ = surely_failed_ = false;
  kv_.clear();
  kv_used_ = 0;
  if (random_.percent(10))
    expect(caltrio_configure(device_, 0), kAlreadyConfigured, "a second configure");
  make_slots();
}

void Driver::make_slots() {
  for (std::size_t graph = 0; graph < world_.graphs.size(); ++graph)
    for (std::int64_t count = random_.between(2, 5); count > 0; --count) {
      slots_.push_back(std::make_unique<Slot>(world_, graph));
      slots_.back()->scribble(static_cast<int>(random_.between(0, 255)));
      map(*slots_.back());
    }
}

void Driver::map(Slot& slot) {
  const Graph& graph = world_.graphs[slot.graph];
  slot.handle = caltrio_buffers_new(device_, graph.name.c_str());
  check(slot.handle != nullptr, "caltrio_buffers_new gave none");
  caltrio_tensor tensor;
  expect(caltrio_buffers_tensor(slot.handle, graph.logits.c_str(), &tensor), 0,
         "caltrio_buffers_tensor");
  check(tensor.byte_size == slot.entries * sizeof slot.logits[0], "the logits' size");
  const auto call = [&](bool out, const std::string& name, void* host, std::size_t bytes, int wanted) {
    while (true) {
      const int fault = world_.strike("map", kMapBroken);
      const int rc = out ? caltrio_map_output(slot.handle, name.c_str(), host, bytes)
                         : caltrio_map_input(slot.handle, name.c_str(), host, bytes);
      expect(rc, fault >= 0 ? fault : wanted, "map of " + name);
      if (fault < 0) return;
    }
  };
  const std::size_t bytes = slot.count * sizeof slot.tokens[0];
  if (random_.percent(10)) call(false, graph.tokens, slot.tokens.get(), bytes - 1, kMapBroken);
  if (random_.percent(10)) call(false, graph.logits, slot.logits.get(), bytes, kWrongDirection);
  call(false, graph.tokens, slot.tokens.get(), bytes, 0);
  call(false, graph.position, slot.positions.get(), bytes, 0);
  call(true, graph.logits, slot.logits.get(), slot.entries * sizeof slot.logits[0], 0);
}

void Driver::free_slots() {
  for (const auto& slot : slots_) {
    check(slot->busy || slot->quiet(), "the card wrote into memory of a slot that had no job");
    caltrio_buffers_free(slot->handle);
  }
  slots_.clear();  // and the host memory: a transfer that still comes is found
}

void Driver::limit(int value) {
  const Ns begin = now_ns();
  caltrio_limit(device_, value);
  limits_.push_back({begin, now_ns(), value});
  note("limit", -1, value);
}

void Driver::resume() {
  caltrio_resume(device_);
  failure_seen_ = surely_failed_ = false;
  note("resume");
}

void Driver::withdraw(std::uint64_t token) {
  const auto found = jobs_.find(token);
  if (found != jobs_.end()) found->second.withdrawn = true;
  note("withdraw", static_cast<std::int64_t>(token));
  caltrio_withdraw(device_, token);
}

void Driver::can_allocate() {
  const std::int64_t more = random_.between(1, 2);
  const int got = caltrio_kv_can_allocate(device_, static_cast<std::uint32_t>(more));
  const bool fault = world_.strike("kv", 0) >= 0;
  expect(got, !fault && (world_.kv_tokens == 0 || kv_used_ + more <= world_.kv_tokens),
         "kv_can_allocate");
}

// Without a model there is none.
void Driver::no_kv() {
  expect(caltrio_kv_can_allocate(device_, 1), 0, "kv_can_allocate without a model");
  expect(caltrio_kv_apply(device_, 1, 1), 0, "kv_apply without a model");
  caltrio_kv_release(device_, 1);
}

void Driver::release(int sequence) {
  caltrio_kv_release(device_, sequence);
  const auto found = kv_.find(sequence);
  if (found == kv_.end()) return;
  kv_used_ -= found->second;
  kv_.erase(found);
}

void Driver::release_idle() {
  for (auto each = sequences_.begin(); each != sequences_.end(); ++each) {
    if (each->second.busy) continue;
    release(each->first);
    sequences_.erase(each);
    return;
  }
}

// What a caller may do at any moment.
void Driver::meddle() {
  if (unreported_ > 0 && random_.percent(8)) withdraw(last_handed_);
  // One that flies or is over, or was never there: no effect.
  if (unreported_ == 0 && random_.percent(3))
    caltrio_withdraw(device_, static_cast<std::uint64_t>(
                                  random_.between(0, static_cast<std::int64_t>(next_token_))));
  if (random_.percent(3)) limit(static_cast<int>(random_.between(1, 3)));
  if (random_.percent(failure_seen_ ? 40 : 2)) resume();
  if (random_.percent(3)) can_allocate();
  if (random_.percent(2)) expect(caltrio_stopped(device_), 0, "caltrio_stopped");
  if (random_.percent(3)) release_idle();
}

void Driver::watch_progress() {
  const Ns silence = now_ns() - progress_ns_;
  if (silence > kDeadlineNs) fail(std::string("nothing came while waiting for ") + waiting_for_);
  if (!busy() || !world_.may_hang() || silence < kHangNs) return;
  note("hangs");
  ++totals_.hangs;
  raise_limit();
  reset(false);
  if (!dead()) configure();
  progress_ns_ = now_ns();
}

// Behind a job that hangs the next one is held back by the limit alone: with a higher one it goes.
void Driver::raise_limit() {
  if (failure_seen_ || world_.blocks || world_.has("hang_infer")) return;
  if (flying_ == 0 || flying_ > 2 || unreported_ > 1) return;
  if (unreported_ == 0) {
    limit(flying_);
    step();
  }
  if (unreported_ == 0 || flying_ != limits_.back().value) return;
  ++totals_.raised;
  limit(limits_.back().value + 1);
  settle(last_handed_, "the job that a higher limit lets go");
}

// Listens, and does nothing else, until that job is reported as submitted, refused or withdrawn.
void Driver::settle(std::uint64_t token, const char* what) {
  const Ns begun = now_ns();
  while (jobs_.at(token).state == Job::State::Handed) {
    listen(5'000'000);
    if (failure_seen_) resume();  // of a job before it
    if (now_ns() - begun > kDeadlineNs) fail(std::string("nothing was reported of ") + what);
  }
}

void Driver::work(std::int64_t jobs, bool to_idle) {
  const std::int64_t until = over_ + jobs;
  progress_ns_ = now_ns();
  while (!dead() && (over_ < until || (to_idle && busy()))) {
    waiting_for_ = over_ < until ? "more jobs to end" : "the last jobs to end";
    if (over_ < until) start();
    meddle();
    const Ns patience_ns = random_.one_of<Ns>({0, 50'000, 2'000'000});
    if (busy() && !random_.percent(15)) listen(patience_ns);
    watch_progress();
  }
}

// The end of a call that was begun; the driver goes on meanwhile.
int Driver::ended(const char* what, bool stop_meanwhile) {
  const Watched watched(what);
  std::int32_t code = -1;
  while (!caltrio_ended(device_, &code)) {
    if (stop_meanwhile && random_.percent(30)) stop();
    if (random_.percent(10) && caltrio_stopped(device_))
      check(caltrio_ended(device_, &code), "caltrio_stopped, and a call that was begun has not ended");
    if (unreported_ > 0 && random_.percent(20)) withdraw(last_handed_);
    if (random_.percent(10)) limit(static_cast<int>(random_.between(1, 3)));
    if (random_.percent(10)) resume();
    if (random_.percent(10)) release_idle();
    if (!world_.has("kv") && random_.percent(10)) caltrio_kv_can_allocate(device_, 1);
    if (!random_.percent(20)) listen(random_.between(0, 500'000));
  }
  return code;
}

// Returns the code that the reset must end with.
int Driver::begin_reset() {
  const int fault = world_.strike("reset", 25);
  const bool whole = world_.reset_scope == "device" || !configured_;
  ++resets_;
  ++totals_.resets;
  shut_ = true;
  note("reset");
  expect(caltrio_begin_reset(device_, kDeadlineNs), 0, "caltrio_begin_reset");
  return fault >= 0 ? fault : whole ? 0 : kUnsupported;
}

int Driver::one_reset(bool stop_meanwhile) {
  resetting_ = true;
  const int wanted = begin_reset();
  const int rc = ended("caltrio_reset", stop_meanwhile);
  resetting_ = false;
  note("reset is over", -1, rc);
  expect(rc, wanted, "caltrio_reset");
  return rc;
}

// Begins a reset and stops, as one does who is not to wait for it.
void Driver::abandon_reset() {
  if (begin_reset() == 0) configured_ = false;
  resetting_ = true;
  if (random_.percent(50)) listen(random_.between(0, 500'000));
  ++totals_.abandoned;
  close();
}

void Driver::reset(bool stop_meanwhile) {
  waiting_for_ = "the reset";
  int rc = 0;
  do {
    rc = one_reset(stop_meanwhile);
  } while (rc != 0 && (world_.reset_scope == "device" || rc != kUnsupported));
  if (rc != 0) {
    dead_ = true;  // nothing but the end is left
    return;
  }
  drain_all();
  check(!busy(), "a job had not come back when the reset was over");
  configured_ = false;
  no_kv();
  free_slots();
  sequences_.clear();
}

void Driver::stop() {
  shut_ = true;
  caltrio_stop(device_);
  stopped_ = true;
  note("stop");
}

void Driver::close() {
  waiting_for_ = "the threads to end";
  if (flying_ > 0) ++totals_.stopped_flying;
  stop();
  for (const auto& slot : slots_) {
    if (slot->busy || random_.percent(50)) continue;
    expect(caltrio_submit(device_, slot->handle, ++next_token_, -1, 0), kUnavailable,
           "submit after stop");
    break;
  }
  const Ns begun = now_ns();
  while (!caltrio_stopped(device_)) {
    if (random_.percent(50)) listen(random_.between(0, 500'000));
    const Ns waited = now_ns() - begun;
    if (waited > kDeadlineNs) fail("the threads did not end after caltrio_stop");
    std::int32_t code = -1;
    if (world_.may_hang() && waited > kHangNs && configured_ && caltrio_ended(device_, &code)) {
      ++totals_.hangs;
      reset(false);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  drain_all();
  check(!busy(), "a job was never reported, and both threads have ended");
  free_slots();
  const Watched watched("caltrio_free");
  caltrio_free(device_);
  device_ = nullptr;
}

}  // namespace stress

#include "card.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>


namespace emulator {
namespace {

// Numbers of specification section 8.
constexpr int kIllegalValue = 4, kAlreadyConfigured = 7, kOutOfRange = 14, kNotConfigured = 16,
              kBusy = 17, kUnavailable = 18, kMapBroken = 24, kUnsupported = 27;

Ns transfer_ns(std::uint64_t bytes, Ns latency, std::int64_t bytes_per_s) {
  const __int128 scaled = static_cast<__int128>(bytes) * 1'000'000'000;
  return latency + static_cast<Ns>((scaled + bytes_per_s - 1) / bytes_per_s);
}

Ns compute_ns(const CardFile::Compute& cost, std::int64_t tokens, std::int64_t past) {
  const __int128 pairs = static_cast<__int128>(tokens) * past + static_cast<__int128>(tokens) * (tokens + 1) / 2;
  const __int128 ps = tokens * static_cast<__int128>(cost.per_token_ps) + pairs * cost.per_pair_ps;
  return cost.base_ns + static_cast<Ns>((ps + 999) / 1000);
}

}  // namespace

Card::Card() : thread_([this] { loop(); }) {}

Card::~Card() {
  {
    const Lock lock(mu_);
    stopping_ = true;
    timer_.notify_all();
    changed_.notify_all();
  }
  thread_.join();
}

void Card::loop() {
  sigset_t signals;  // they are for the program's own threads
  sigfillset(&signals);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&signals, fault);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  pthread_setname_np(pthread_self(), "calrt-card");
  prctl(PR_SET_TIMERSLACK, 1);  // wake when asked to
  Lock lock(mu_);
  while (!stopping_) {
    const Ns next = engine_ ? engine_->time.next() : -1;
    if (next < 0) {
      timer_.wait(lock);
      continue;
    }
    const Ns now = now_ns();
    if (next > now + kSpinNs) {
      timer_.wait_until(lock, at(next - kSpinNs));
      continue;  // an earlier event may have come
    }
    if (next > now) {
      // Without the lock, so that a submit gets in between; what it adds is seen the next time round.
      lock.unlock();
      spin_until(std::min(next, now + kSpinNs / 4));
      lock.lock();
      continue;
    }
    engine_->time.run(now);
    // Not at each event: whoever waits is woken for what he may wait for.
    if (news_ || catching_up_ > 0 || engine_->take_freed()) changed_.notify_all();
    news_ = false;
  }
}

// Events that are due and not yet done come before what a caller does now; returns that now.
Ns Card::catch_up(Lock& lock) {
  const std::uint64_t generation = generation_;
  ++catching_up_;
  Ns now = now_ns();
  while (!stopping_ && generation == generation_ && engine_ && engine_->time.next() >= 0 &&
         engine_->time.next() <= now) {
    changed_.wait(lock);
    now = now_ns();
  }
  --catching_up_;
  return now;
}

int Card::configure(const CalbinFile& calbin, const CardFile& file) {
  const Lock lock(mu_);
  if (configured_) return kAlreadyConfigured;
  calbin_ = calbin;
  file_ = file;
  if (const FaultLine* fault = strikes("configure")) return fault->code ? fault->code : 19;
  engine_ = std::make_unique<Engine>(file_);
  kv_ = Kv(file_.kv_tokens);
  const auto& tensors = calbin_.graphs.front().info.tensors;
  for (const calrt::TensorInfo& tensor : tensors)
    if (tensor.name == calbin_.graphs.front().logits)
      model_ = std::make_unique<TokenModel>(tensor.shape.back());
  csrs_.clear();
  for (const Graph& graph : calbin_.graphs)
    for (const std::string& name : {graph.csr_cur, graph.csr_total}) csrs_[{graph.info.name, name}] = 0;
  configured_ = true;
  return 0;
}

int Card::set_csr(const std::string& model, const std::string& name, std::uint32_t value) {
  const Lock lock(mu_);
  if (const FaultLine* fault = strikes("csr")) return fault->code ? fault->code : kOutOfRange;
  const auto found = csrs_.find({model, name});
  if (found == csrs_.end()) return kOutOfRange;
  found->second = value;
  return 0;
}

bool Card::can_allocate(std::uint32_t sequences) {
  const Lock lock(mu_);
  return strikes("kv") == nullptr && kv_.can_allocate(sequences);
}

bool Card::apply(calrt::KvSeqId sequence, std::uint32_t target) {
  const Lock lock(mu_);
  return kv_.apply(sequence, target);
}

void Card::release(calrt::KvSeqId sequence) {
  const Lock lock(mu_);
  kv_.release(sequence);
}

int Card::enable_parallel(bool on) {
  const Lock lock(mu_);
  return on && file_.engines < 2 && configured_ ? kUnsupported : 0;
}

Graph Card::graph(const std::string& model) {
  const Lock lock(mu_);
  const Graph* found = calbin_.find(model);
  return found == nullptr ? Graph() : *found;
}

bool Card::reports_stages() {
  const Lock lock(mu_);
  return file_.report_stages;
}

int Card::buffer_fault(const char* point) {
  const Lock lock(mu_);
  const FaultLine* fault = strikes(point);
  if (fault == nullptr) return 0;
  return fault->code ? fault->code : kMapBroken;
}

const FaultLine* Card::strikes(const char* point) {
  const std::int64_t call = calls_[point]++;
  for (FaultLine& fault : file_.faults) {
    if (fault.point != point) continue;
    const bool here = fault.every > 0 ? (call + 1) % fault.every == 0 : fault.at < 0 || fault.at == call;
    if (!here) continue;
    std::int64_t& struck = calls_["struck " + std::to_string(&fault - file_.faults.data())];
    if (fault.times > 0 && struck >= fault.times) continue;
    ++struck;
    return &fault;
  }
  return nullptr;
}

Ns Card::jittered(Stage stage, Ns duration, std::int64_t number) const {
  if (file_.jitter == Jitter::None || !file_.jittered[stage]) return duration;
  const std::uint64_t key = mix64(mix64(file_.jitter_seed ^ stage) ^ static_cast<std::uint64_t>(number));
  const double cv = static_cast<double>(file_.jitter_cv_ppm) / 1e6;
  const double first = (static_cast<double>(mix64(key) >> 11) + 0.5) / 9007199254740992.0;
  double factor = 1.0;
  if (file_.jitter == Jitter::Uniform) {
    factor = 1.0 + cv * std::sqrt(3.0) * (2.0 * first - 1.0);
  } else if (file_.jitter == Jitter::Exponential) {
    factor = -std::log(first);
  } else {
    const double second = static_cast<double>(mix64(key ^ 1) >> 11) / 9007199254740992.0;
    const double normal = std::sqrt(-2.0 * std::log(first)) * std::cos(2.0 * M_PI * second);
    const double variance = std::log1p(cv * cv);
    factor = std::exp(std::sqrt(variance) * normal - variance / 2.0);
  }
  return static_cast<Ns>(std::llround(static_cast<double>(duration) * factor));
}

int Card::submit(const std::string& model, const std::map<std::string, Mapped>& inputs,
                 const Mapped& output, calrt::KvSeqId sequence, int engine, JobPtr* made) {
  const Ns begin = now_ns();
  Lock lock(mu_);
  if (!configured_) return kNotConfigured;
  const Graph* graph = calbin_.find(model);
  if (graph == nullptr || engine >= file_.engines) return kIllegalValue;
  if (output.host == nullptr) return kMapBroken;
  for (const auto& [name, tensor] : inputs)
    if (tensor.host == nullptr) return kMapBroken;
  if (strikes("throw") != nullptr) throw std::runtime_error("injected");
  const std::uint64_t generation = generation_;
  const bool hangs = strikes("hang_infer") != nullptr;
  while (hangs && generation == generation_ && !stopping_) changed_.wait(lock);
  if (const FaultLine* fault = strikes("infer")) return fault->code ? fault->code : kBusy;

  const auto job = std::make_shared<Job>();
  job->number = jobs_++;
  job->transfer.sequence = sequence;
  job->transfer.cur_len = csrs_[{model, graph->csr_cur}];
  job->transfer.total_len = csrs_[{model, graph->csr_total}];
  const std::int64_t count =
      std::max<std::int64_t>(job->transfer.total_len - job->transfer.cur_len, 0);
  std::uint64_t bytes = 0;
  std::map<std::string, Mapped> taken = inputs;
  for (auto& [name, tensor] : taken) {
    if (!tensor.slice) {  // as many tokens as the CSRs say
      const std::uint64_t positions = tensor.info.shape.size() > 1 ? tensor.info.shape[1] : 1;
      const std::uint64_t each = tensor.info.byte_size / std::max<std::uint64_t>(positions, 1);
      tensor.slice = {0, std::min(tensor.info.byte_size, static_cast<std::uint64_t>(count) * each)};
    }
    bytes += tensor.slice->second;
  }
  const Ns submit_ns = jittered(kSubmit, file_.submit_ns, job->number);
  Flight& flight = *job->flight;
  flight.h2d_ns = jittered(kH2d, transfer_ns(bytes, file_.h2d_latency_ns, file_.h2d_bytes_per_s), job->number);
  const auto cost = file_.compute.find(graph->kind);
  if (cost != file_.compute.end())
    flight.compute_ns =
        jittered(kCompute, compute_ns(cost->second, count, job->transfer.cur_len), job->number);
  flight.d2h_ns = jittered(
      kD2h, transfer_ns(output.info.byte_size, file_.d2h_latency_ns, file_.d2h_bytes_per_s), job->number);
  const auto tile = static_cast<std::size_t>(graph->tile_d0);
  flight.on_read = [this, weak = std::weak_ptr<Job>(job), taken, output, tile] {
    const JobPtr alive = weak.lock();
    if (!alive || !file_.compute_tokens) return;
    read(*alive, taken);
    compute(*alive, output, tile);  // early in the time of its compute: it delays no event then
  };
  flight.on_write = [this, weak = std::weak_ptr<Job>(job), output](Ns end) {
    if (const JobPtr alive = weak.lock()) write(*alive, output, end);
  };
  flight.on_written = [this] { news_ = true; };
  job->hangs = strikes("hang") != nullptr;
  job->hangs_for_ever = strikes("hang_for_ever") != nullptr;
  job->exception = strikes("exception") != nullptr;

  if (submit_ns > 0) {
    lock.unlock();
    sleep_until(begin + submit_ns);
    lock.lock();
  }
  Ns now = catch_up(lock);
  while (generation == generation_ && !stopping_ && engine_->free_slot(engine) < 0) {
    if (file_.submit_when_full == WhenFull::Busy) return kBusy;
    changed_.wait(lock);
    now = catch_up(lock);
  }
  if (generation != generation_ || stopping_) return kUnavailable;
  issued_.push_back(job);
  *made = job;
  engine_->time.set(now);
  engine_->start(job->flight, engine_->free_slot(engine));
  timer_.notify_all();
  return 0;
}

void Card::read(Job& job, const std::map<std::string, Mapped>& inputs) {
  const Graph* graph = nullptr;
  for (const Graph& one : calbin_.graphs)
    if (inputs.count(one.tokens) && inputs.count(one.position)) graph = &one;
  if (graph == nullptr) return;
  const auto take = [&](const std::string& name, std::vector<std::int32_t>& into) {
    const Mapped& tensor = inputs.at(name);
    into.resize(tensor.slice->second / sizeof(std::int32_t));
    if (into.empty()) return;
    std::memcpy(into.data(), tensor.host + tensor.slice->first, into.size() * sizeof(std::int32_t));
  };
  take(graph->tokens, job.transfer.tokens);
  take(graph->position, job.transfer.positions);
}

void Card::compute(Job& job, const Mapped& output, std::size_t tile_d0) {
  const std::size_t vocab = output.info.shape.back();
  if (!spare_.empty()) {
    job.logits.swap(spare_.back());
    spare_.pop_back();
  }
  job.logits.resize(output.info.byte_size / sizeof(std::uint16_t));
  model_->run(kv_, job.transfer, job.logits.data(), job.logits.size() / vocab, tile_d0);
  if (strikes("nan") != nullptr) job.logits.back() = 0x7FC0;
}

// D2H: the copy is made while it lasts, and whoever waits is woken in time to spin to its end.
void Card::write(Job& job, const Mapped& output, Ns end) {
  if (!job.logits.empty()) {  // tokens are computed
    std::memcpy(output.host, job.logits.data(), job.logits.size() * sizeof(std::uint16_t));
    spare_.push_back(std::move(job.logits));
  }
  if (const FaultLine* fault = strikes("wait")) job.code = fault->code ? fault->code : 13;
  if ((job.code != 0 || job.exception) && file_.compute_tokens)
    TokenModel::failed(kv_, job.transfer, file_.kv_after_failed_wait);
  news_ = true;
  job.due = end + jittered(kInterrupt, file_.interrupt_ns, job.number);
}

int Card::wait(const JobPtr& job, calrt::BufStatus* status) {
  Lock lock(mu_);
  const auto may_return = [&] {
    return job->due >= 0 && !job->hangs && !job->hangs_for_ever &&
           (file_.completion_order == WaitOrder::Any || issued_.front() == job);
  };
  while (true) {
    if (job->hangs_for_ever) {
      changed_.wait(lock);
      continue;
    }
    if (job->killed || stopping_) break;
    if (!may_return()) {
      changed_.wait(lock);
      continue;
    }
    if (job->due > now_ns()) {
      lock.unlock();
      sleep_until(job->due);
      lock.lock();
    } else if (job->flight->times.d2h_end < 0) {
      changed_.wait(lock);  // it has ended, and the card's thread has yet to say so
    } else {
      break;
    }
  }
  issued_.erase(std::remove(issued_.begin(), issued_.end(), job), issued_.end());
  if (job->killed || stopping_) {
    *status = calrt::BufStatus::DONE_CCU_EXCEPTION;
    changed_.notify_all();
    return kUnavailable;
  }
  if (file_.slot_release == SlotRelease::Wait) engine_->release_slot(job->flight->slot);
  changed_.notify_all();
  *status = job->exception ? calrt::BufStatus::DONE_CCU_EXCEPTION : calrt::BufStatus::DONE;
  return job->code;
}

int Card::reset(ResetScope asked) {
  Lock lock(mu_);
  if (const FaultLine* fault = strikes("reset")) return fault->code ? fault->code : 25;
  if (file_.reset_scope == ResetScope::None || !configured_) return configured_ ? kUnsupported : 0;
  const Ns busy = file_.reset_ns;
  if (file_.reset_scope != ResetScope::Device) {
    // Not enough for anything but the jobs themselves, and only ResetCCU() does it.
    if (asked == ResetScope::Device) return kUnsupported;
    for (const JobPtr& job : issued_) {
      const bool same = file_.reset_scope == ResetScope::Engine &&
                        job->flight->slot == issued_.front()->flight->slot;
      if (job == issued_.front() || same) job->exception = true;
    }
    return 0;
  }
  for (const JobPtr& job : issued_) job->killed = true;
  issued_.clear();
  ++generation_;
  if (asked == ResetScope::Device) {
    engine_.reset();
    configured_ = false;
  } else {
    engine_ = std::make_unique<Engine>(file_);
  }
  changed_.notify_all();
  timer_.notify_all();
  lock.unlock();
  sleep_until(now_ns() + busy);
  return 0;
}

}  // namespace emulator

#include "ring.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace shim {
namespace {

constexpr int kBusy = 17, kUnavailable = 18;  // numbers of specification section 8

}  // namespace

void begin_thread(const char* name) {
  sigset_t signals;
  sigfillset(&signals);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&signals, fault);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  pthread_setname_np(pthread_self(), name);
}

calrt::CalrtCode call_infer(calrt::VirtualDevice* device, caltrio_buffers* buffers, int engine) {
  try {
    if (engine < 0) return calrt::infer(device, buffers->model, &buffers->input, &buffers->output);
    return calrt::infer_with_fixed_task_type(device, buffers->model, &buffers->input,
                                             &buffers->output, engine);
  } catch (...) {
    return kUnexpected;
  }
}

void call_wait(caltrio_buffers* buffers, caltrio_completion* done) {
  try {
    done->rc = buffers->output.Wait();
    done->waited_ns = now_ns();
    done->exception = buffers->output.GetStatus() == calrt::BufStatus::DONE_CCU_EXCEPTION;
    for (const calrt::TensorInfo& tensor : buffers->output.Tensors())
      if (tensor.name == buffers->output_name) done->output_bytes = tensor.ByteSize();
    calrt::StageTimes times;
    if (!buffers->output.GetStageTimes(&times)) return;
    done->engine = times.engine;
    done->dies = times.dies;
    done->h2d_start_ns = times.h2d_start;
    done->h2d_end_ns = times.h2d_end;
    done->d2h_start_ns = times.d2h_start;
    done->d2h_end_ns = times.d2h_end;
    std::copy_n(times.die_start, times.dies, done->die_start_ns);
    std::copy_n(times.die_end, times.dies, done->die_end_ns);
  } catch (...) {
    done->rc = kUnexpected;
    done->waited_ns = now_ns();
  }
}

bool failed(const caltrio_completion& done) {
  return done.rc != calrt::CalrtSuccess || done.exception != 0;
}

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Ring::Ring(calrt::VirtualDevice* device)
    : device_(device), fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  submit_thread_ = std::thread([this] { submitter(); });
  wait_thread_ = std::thread([this] { completer(); });
}

Ring::~Ring() {
  submit_thread_.join();
  wait_thread_.join();
  close(fd_);
}

void Ring::signal() {
  const std::uint64_t one = 1;
  // It cannot be full: a drain sets it back, and there are few reports.
  [[maybe_unused]] const auto written = write(fd_, &one, sizeof one);
}

void Ring::report(const caltrio_submission& submission) {
  submissions_.push_back(submission);
  signal();
}

int Ring::submit(caltrio_buffers* buffers, std::uint64_t token, int engine) {
  const Lock lock(mu_);
  if (stop_) return kUnavailable;
  if (!staged_.empty()) return kBusy;
  staged_.push_back({buffers, token, engine});
  if (may_submit()) to_submit_.notify_one();
  return 0;
}

void Ring::withdraw(std::uint64_t token) {
  const Lock lock(mu_);
  if (staged_.empty() || staged_.front().token != token) return;  // the card has it, or had it
  staged_.pop_front();
  report({token, 0, 1});
}

void Ring::withdraw_all() {
  for (const Job& job : staged_) report({job.token, 0, 1});
  staged_.clear();
}

void Ring::limit(int max_inflight) {
  const Lock lock(mu_);
  limit_ = max_inflight;
  to_submit_.notify_one();
}

void Ring::resume() {
  const Lock lock(mu_);
  // One that nobody has fetched yet has not been looked at either.
  failed_ = failed_ && std::any_of(completions_.begin(), completions_.end(), failed);
  to_submit_.notify_one();
}

void Ring::shut() {
  const Lock lock(mu_);
  shut_ = true;
  withdraw_all();
}

void Ring::open() {
  const Lock lock(mu_);
  shut_ = failed_ = false;
  to_submit_.notify_one();
}

bool Ring::empty_within(std::int64_t timeout_ns) {
  Lock lock(mu_);
  return idle_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return in_flight_ == 0; });
}

void Ring::stop() {
  const Lock lock(mu_);
  stop_ = true;
  withdraw_all();
  to_submit_.notify_all();
  to_wait_.notify_all();
}

bool Ring::stopped() {
  const Lock lock(mu_);
  return running_ == 0;
}

void Ring::submitter() {
  begin_thread("caltrio-infer");
  Lock lock(mu_);
  while (true) {
    to_submit_.wait(lock, [&] { return stop_ || (!staged_.empty() && may_submit()); });
    if (stop_) break;
    Job job = staged_.front();
    staged_.pop_front();
    ++in_flight_;
    lock.unlock();
    job.infer_ns = now_ns();
    const int rc = call_infer(device_, job.buffers, job.engine);
    job.submitted_ns = now_ns();
    lock.lock();
    if (rc == calrt::CalrtSuccess) {
      flying_.push_back(job);
      to_wait_.notify_one();
    } else {
      --in_flight_;
      idle_.notify_all();
    }
    report({job.token, rc, 0});
  }
  --running_;
  to_wait_.notify_all();
}

void Ring::completer() {
  begin_thread("caltrio-wait");
  Lock lock(mu_);
  while (true) {
    // What the submit thread is about to hand over is waited for as well.
    to_wait_.wait(lock, [&] { return !flying_.empty() || (stop_ && running_ == 1); });
    if (flying_.empty()) break;
    const Job job = flying_.front();
    lock.unlock();
    caltrio_completion done{};
    done.token = job.token;
    done.infer_ns = job.infer_ns;
    done.submitted_ns = job.submitted_ns;
    done.engine = -1;
    done.h2d_start_ns = done.h2d_end_ns = done.d2h_start_ns = done.d2h_end_ns = -1;
    call_wait(job.buffers, &done);
    lock.lock();
    flying_.pop_front();
    --in_flight_;
    if (failed(done)) failed_ = true;
    completions_.push_back(done);
    signal();
    if (!staged_.empty()) to_submit_.notify_one();
    if (in_flight_ == 0) idle_.notify_all();
  }
  --running_;
}

int Ring::drain(caltrio_submission* submissions, std::int32_t* submitted,
                caltrio_completion* completions, std::int32_t* completed, int most) {
  const Lock lock(mu_);
  std::uint64_t count;
  [[maybe_unused]] const auto got = read(fd_, &count, sizeof count);
  const auto take = [most](auto& from, auto* to) {
    const int count = std::min<int>(static_cast<int>(from.size()), most);
    std::copy_n(from.begin(), count, to);
    from.erase(from.begin(), from.begin() + count);
    return count;
  };
  *submitted = take(submissions_, submissions);
  // With a submission left over, its completion would come first.
  *completed = submissions_.empty() ? take(completions_, completions) : 0;
  if (!submissions_.empty() || !completions_.empty()) signal();
  return *submitted + *completed;
}

}  // namespace shim

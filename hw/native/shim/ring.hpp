// The submission/completion ring: one thread that calls infer() and nothing else, one that calls
// Wait() and nothing else (specification 5.1).
//
// The in-flight permit is taken and given back here, so a job that is held back goes to the card at
// the moment in which a permit comes free, without the caller's help.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "calrt/calrt.hpp"
#include "caltrio.h"

struct caltrio_buffers {
  caltrio_buffers(calrt::VirtualDevice* device, const std::string& name)
      : model(name), input(device, name), output(device, name) {}
  std::string model;
  calrt::CalrtInputBuf input;
  calrt::CalrtOutputBuf output;
  std::vector<calrt::TensorInfo> tensors;
  std::string output_name;  // of the tensor that was mapped for output
};

namespace shim {

inline constexpr int kUnexpected = 15;  // a C++ exception of the vendor's

std::int64_t now_ns();

// For each thread of ours: signals are for the interpreter's, and a name for whoever looks.
void begin_thread(const char* name);

// The vendor's calls, with its exceptions as codes.
calrt::CalrtCode call_infer(calrt::VirtualDevice* device, caltrio_buffers* buffers, int engine);
void call_wait(caltrio_buffers* buffers, caltrio_completion* done);
bool failed(const caltrio_completion& done);

class Ring {
 public:
  explicit Ring(calrt::VirtualDevice* device);
  ~Ring();  // only once stopped()

  int submit(caltrio_buffers* buffers, std::uint64_t token, int engine);
  void withdraw(std::uint64_t token);
  void limit(int max_inflight);
  void resume();
  // Withdraws what is held back, and submits nothing until open().
  void shut();
  void open();
  // Is every job back, within the time?
  bool empty_within(std::int64_t timeout_ns);
  void stop();
  bool stopped();
  int event_fd() const { return fd_; }
  int drain(caltrio_submission* submissions, std::int32_t* submitted,
            caltrio_completion* completions, std::int32_t* completed, int most);

 private:
  struct Job {
    caltrio_buffers* buffers;
    std::uint64_t token;
    int engine;
    std::int64_t infer_ns = 0, submitted_ns = 0;
  };
  using Lock = std::unique_lock<std::mutex>;
  void submitter();
  void completer();
  bool may_submit() const { return !failed_ && !shut_ && in_flight_ < limit_; }
  void report(const caltrio_submission& submission);
  void withdraw_all();
  void signal();

  calrt::VirtualDevice* device_;
  int fd_;
  std::mutex mu_;
  std::condition_variable to_submit_, to_wait_, idle_;
  std::deque<Job> staged_;    // at most one
  std::deque<Job> flying_;    // submitted, Wait() not yet returned; in order
  int in_flight_ = 0;         // from before infer() to after Wait()
  int limit_ = 1;
  bool failed_ = false;       // something went wrong, and nobody has looked at it
  bool shut_ = true;          // no model, or a reset
  bool stop_ = false;
  int running_ = 2;           // threads
  std::vector<caltrio_submission> submissions_;
  std::vector<caltrio_completion> completions_;
  std::thread submit_thread_, wait_thread_;
};

}  // namespace shim

// Routed experts for a device that goes through the layers by itself.
//
// The device writes a layer's question into memory that both see, and then the number of the step;
// the CPU computes, writes its answer, and then the number.  Neither calls the other, so a whole
// step can be one launch.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "experts/experts.h"

namespace hmt {

// What passes between the device and the CPU for one layer, in host memory that the device maps.
struct Mailbox {
  const void* x;            // [tokens, columns of gate]
  const int64_t* chosen;    // [tokens, top_k]; -1: not the CPU's
  const float* scales;      // [tokens, top_k]
  const int32_t* cut;       // [2]: an expert whose first rows of gate and up, so many, are not the
                            // CPU's; -1: none
  float* total;             // [tokens, rows of down]: the answer
  const uint32_t* asked;    // the step whose question is complete
  uint32_t* answered;       // the step whose answer is complete
};

struct ServedLayer {
  std::vector<Expert> experts;  // in ascending order of ids
  Mailbox mail;
  std::vector<int32_t> places;  // of experts, by id; -1: not here.  The service fills it.
};

// What a step's answers took.
struct Served {
  size_t experts = 0;  // computed, each once per layer
  double waited_s = 0, computed_s = 0;
  bool complete = false;  // false where the device kept silent
  std::exception_ptr failure;
};

class ExpertService {
 public:
  ExpertService(std::vector<ServedLayer> layers, DType type, size_t columns, size_t hidden,
                size_t top_k, Activation activation);

  // Waits for what was begun.
  ~ExpertService();

  // Begins to answer all layers of step `number`, in their order, on the service's thread and after
  // the steps that were begun before: the caller prepares the next step meanwhile.  When a question
  // does not come within `patience_s`, marks all layers as answered, so that the device goes on.
  void begin(uint32_t number, size_t tokens, size_t threads, double patience_s);

  // Waits for the earliest step that was begun and not ended.  Throws std::logic_error where there
  // is none, and what a kernel threw.
  Served end();

 private:
  struct Step {
    uint32_t number;
    size_t tokens, threads;
    double patience_s;
  };

  void work();
  Served serve(const Step& step) const;
  // Marks all layers of step `number` as answered: the device does not wait for them.
  void release(uint32_t number) const;
  size_t answer(const ServedLayer& layer, size_t tokens, size_t threads,
                std::vector<Expert>& wanted) const;

  std::vector<ServedLayer> layers_;
  DType type_;
  size_t columns_, hidden_, top_k_;
  Activation activation_;

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::deque<Step> begun_;     // the first of them is being served
  std::deque<Served> served_;  // and not ended
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace hmt

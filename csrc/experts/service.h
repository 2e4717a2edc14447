// Routed experts for a device that goes through the layers by itself.
//
// The device writes a layer's question into memory that both see, and then the number of the step;
// the CPU computes, writes its answer, and then the number.  Neither calls the other, so a whole
// step can be one launch.
#pragma once

#include <cstdint>
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
};

class ExpertService {
 public:
  ExpertService(std::vector<ServedLayer> layers, DType type, size_t columns, size_t hidden,
                size_t top_k, Activation activation);

  // Answers all layers of step `number`, in their order.  Gives up, and answers everything with
  // what is there, when a question does not come within `patience_s`.
  Served serve(uint32_t number, size_t tokens, size_t threads, double patience_s) const;

  // Let nobody wait for an answer to step `number`.
  void release(uint32_t number) const;

 private:
  size_t answer(const ServedLayer& layer, size_t tokens, size_t threads,
                std::vector<Expert>& wanted) const;

  std::vector<ServedLayer> layers_;
  DType type_;
  size_t columns_, hidden_, top_k_;
  Activation activation_;
};

}  // namespace hmt

// Some experts with their tokens, computed as one queue of small items without a barrier.
#pragma once

#include <atomic>
#include <vector>

#include "experts/experts.h"
#include "experts/grouping.h"
#include "experts/input_rows.h"

namespace hmt {

// What all batches of a call share.
struct ExpertCall {
  const ExpertChoice* routing;
  const ConstMatrix* x;
  Activation activation;
  const ExpertSum* sum;
  size_t threads;
  Forms x_forms;         // that gate and up are multiplied with
  Forms product_forms;   // that down is multiplied with
  size_t width, hidden;  // the most rows of gate; rows of down
  const Grouping* grouping;
  InputRows tokens;      // x in x_forms, where a token has an expert; made by the first batch
};

// The items of a batch, in this order, those of several experts interleaved:
//
//   prepare   tokens in the forms that gate and up are multiplied with
//   gather    16 of an expert's tokens, next to each other and arranged
//   expand    rows of gate and of up; their gated product
//   round     16 products in the form that down is multiplied with
//   reduce    rows of down; who computes them for the last expert adds up these rows of all experts
//
// Threads take them one after the other.  An item waits only for items before it, which other
// threads have begun, so nobody waits for ever, and at most for as long as an item takes.
class Batch {
 public:
  // Bytes that an expert takes from the Scratch of its batch.
  static size_t bytes(const ExpertCall& call, const Share& share);
  // The same for a thread.
  static size_t thread_bytes(const ExpertCall& call);

  Batch(const ExpertCall& call, const Share* shares, size_t count, bool first, bool last,
        Scratch& scratch);

  void run();

 private:
  enum class Step { kPrepare, kGather, kExpand, kRound, kReduce };

  struct Arranged {
    uint8_t* memory = nullptr;
    size_t block_bytes = 0;  // 0: not arranged
  };
  struct Part {
    const Expert* expert;
    size_t first, count;  // pairs, counted from the batch's first
    bool gathered;        // else the tokens are all of the call's, as they are
    Inputs x, product;
    Arranged gate, up, down;
    uint32_t gather_items, expand_items, round_items, reduce_items;
  };
  // Items of one step of one part that follow each other.
  struct Segment {
    Step step;
    size_t part, first_item;
  };
  struct alignas(64) Progress {
    std::atomic<uint32_t> gathered{0}, expanded{0}, rounded{0};
  };
  struct Worker {
    float* gate;  // also results of down
    float* up;
    float* wide;
  };

  void plan_rows();
  Part make_part(const Share& share, Scratch& scratch) const;
  void enqueue();
  void append(Step step, size_t part, uint32_t items);
  void drain();
  void run_item(Step step, size_t part, size_t item, const Worker& worker);

  void prepare(size_t item, const Worker& worker);
  void gather(const Part& part, size_t block);
  void expand(const Part& part, size_t item, const Worker& worker);
  void round(const Part& part, size_t block, const Worker& worker);
  void reduce(const Part& part, size_t item, const Worker& worker);
  void add_up(size_t item);

  const ExpertCall& call_;
  const Share* shares_;
  size_t count_, first_pair_, pairs_;
  bool first_, last_;
  InputRows gathered_, products_;
  char* product_numbers_;  // [pairs, width] in the type of x
  char* outputs_;          // [pairs, hidden] in the type of x
  size_t expand_rows_ = 0, reduce_rows_ = 0;
  std::vector<Part> parts_;
  std::vector<Progress> progress_;
  std::vector<Segment> segments_;
  std::vector<std::atomic<uint32_t>> reduced_;  // experts that have computed these rows of down
  uint32_t prepare_items_ = 0;
  size_t items_ = 0;
  alignas(64) std::atomic<uint32_t> prepared_{0};
  alignas(64) std::atomic<size_t> next_{0};
};

}  // namespace hmt

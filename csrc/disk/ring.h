// Reads through io_uring, on the kernel's own calls: many at once from one thread.
//
// One thread reads and waits; `wake`, `add_memory` and `remove_memory` may be called from any.
// Where the kernel allows it, files are registered, and a read into registered memory saves the
// kernel finding and pinning its pages; everything works without, too.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

struct io_uring_cqe;  // linux/io_uring.h
struct io_uring_params;
struct io_uring_sqe;

namespace hmt {

// A read that has ended: bytes that were read, or a negative errno.
struct Completion {
  std::uint64_t tag;
  std::int64_t result;
};

class Ring {
 public:
  // Room for `reads` reads at once.  std::system_error where the kernel has no io_uring for us:
  // ENOSYS (too old, or built without), EPERM (seccomp, or kernel.io_uring_disabled), ENOMEM.
  explicit Ring(unsigned reads);
  // Waits for reads that are in flight: the kernel would write into memory that is given up.
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Begins to read `file` from `offset` into `parts`, one after the other.  Only a read that
  // reaches the end of the file ends with fewer bytes; short reads on the way are continued.  With
  // `direct` the file was opened with O_DIRECT, where only the end of the file is not aligned.
  // std::logic_error when no room is left.  The memory must stay until the read has ended.
  void read(std::uint64_t tag, int file, std::uint64_t offset, std::vector<iovec> parts,
            bool direct);

  // Waits until a read has ended or somebody calls `wake`; all reads that have ended since.
  std::vector<Completion> wait();

  // Ends a wait, or the next one.
  void wake();

  // Whether reads of `file` will use a registered file.  It must be removed before it is closed:
  // its number may come to mean another file.
  bool add_file(int file);
  void remove_file(int file);

  // Whether reads into [memory, memory + bytes) will use registered memory.  The pages stay pinned
  // until it is removed, so it must be removed before they are given back (munmap, MADV_DONTNEED).
  bool add_memory(void* memory, std::size_t bytes);
  void remove_memory(void* memory);

  unsigned in_flight() const { return in_flight_; }

 private:
  struct Read {
    std::uint64_t tag;
    int file;
    std::uint64_t offset;
    std::vector<iovec> parts;
    std::size_t part;  // the first that is not full
    std::int64_t done;
    bool direct;
  };
  struct Memory {
    std::size_t bytes;
    unsigned slot;
  };

  void map_queues(const io_uring_params& params);
  void register_tables();
  void release();
  io_uring_sqe* next_entry();
  void submit_entry();
  void start(unsigned index);
  int memory_slot(const iovec& part);
  void watch_wakes();
  bool reap(std::vector<Completion>* ended);
  bool advance(Read* read, std::int64_t result);
  int enter(unsigned submit, unsigned least);

  int ring_ = -1;
  int wakes_ = -1;  // eventfd
  void* queue_memory_ = nullptr;
  std::size_t queue_bytes_ = 0;
  void* entry_memory_ = nullptr;
  std::size_t entry_bytes_ = 0;
  unsigned* sq_tail_ = nullptr;
  unsigned* sq_array_ = nullptr;
  unsigned sq_mask_ = 0;
  unsigned* cq_head_ = nullptr;
  unsigned* cq_tail_ = nullptr;
  unsigned cq_mask_ = 0;
  io_uring_cqe* completions_ = nullptr;

  std::vector<Read> reads_;
  std::vector<unsigned> idle_;  // indices into reads_
  unsigned in_flight_ = 0;
  bool watching_ = false;

  std::vector<int> files_;  // by slot; -1: free
  std::mutex memory_lock_;
  std::map<std::uintptr_t, Memory> memory_;
  std::vector<unsigned> memory_slots_;  // free ones
};

}  // namespace hmt

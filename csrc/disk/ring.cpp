#include "disk/ring.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

// Sparse tables came with the headers of Linux 5.19.  Older ones build an extension without
// io_uring; a kernel that is older than the headers says so when it is asked.
#if defined(IORING_RSRC_REGISTER_SPARSE) && defined(SYS_io_uring_setup)

#include <poll.h>

namespace hmt {
namespace {

constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};
constexpr unsigned kFiles = 256;
constexpr unsigned kMemories = 4096;
constexpr std::size_t kMostMemoryBytes = std::size_t{1} << 30;  // the kernel's limit for one
constexpr std::int64_t kAlignment = 512;  // what O_DIRECT asks of offsets, at least

[[noreturn]] void fail(int error, const char* what) {
  throw std::system_error(error, std::generic_category(), what);
}

unsigned load(const unsigned* value) { return __atomic_load_n(value, __ATOMIC_ACQUIRE); }
void store(unsigned* value, unsigned to) { __atomic_store_n(value, to, __ATOMIC_RELEASE); }

template <typename T>
T* inside(void* memory, std::size_t at) {
  return reinterpret_cast<T*>(static_cast<char*>(memory) + at);
}

long control(int ring, unsigned operation, const void* argument, unsigned count) {
  const long result = syscall(SYS_io_uring_register, ring, operation, argument, count);
  return result < 0 ? -errno : result;
}

}  // namespace

Ring::Ring(unsigned reads) : reads_(std::max(1u, reads)) {
  io_uring_params params = {};
  params.flags = IORING_SETUP_CLAMP;
  // One more entry: the watch for wakes.
  const long made = syscall(SYS_io_uring_setup, static_cast<unsigned>(reads_.size()) + 1, &params);
  if (made < 0) fail(errno, "io_uring_setup");
  ring_ = static_cast<int>(made);
  try {
    // Without NODROP (Linux 5.5) a completion could be lost.
    const unsigned wanted = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP;
    if ((params.features & wanted) != wanted) fail(ENOSYS, "io_uring of Linux 5.5");
    if (params.sq_entries < reads_.size() + 1) fail(EINVAL, "io_uring_setup");
    map_queues(params);
    wakes_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wakes_ < 0) fail(errno, "eventfd");
    register_tables();
  } catch (...) {
    release();
    throw;
  }
  for (unsigned i = 0; i < reads_.size(); ++i) idle_.push_back(i);
}

Ring::~Ring() {
  try {
    while (in_flight_ != 0) wait();
  } catch (const std::system_error&) {  // nothing more can be done
  }
  release();
}

void Ring::map_queues(const io_uring_params& params) {
  const std::size_t submission = params.sq_off.array + params.sq_entries * sizeof(unsigned);
  const std::size_t completion = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  const int shared = MAP_SHARED | MAP_POPULATE;
  queue_bytes_ = std::max(submission, completion);
  void* memory = mmap(nullptr, queue_bytes_, PROT_READ | PROT_WRITE, shared, ring_,
                      IORING_OFF_SQ_RING);
  if (memory == MAP_FAILED) fail(errno, "mapping the queues of io_uring");
  queue_memory_ = memory;
  entry_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  memory = mmap(nullptr, entry_bytes_, PROT_READ | PROT_WRITE, shared, ring_, IORING_OFF_SQES);
  if (memory == MAP_FAILED) fail(errno, "mapping the entries of io_uring");
  entry_memory_ = memory;
  sq_tail_ = inside<unsigned>(queue_memory_, params.sq_off.tail);
  sq_array_ = inside<unsigned>(queue_memory_, params.sq_off.array);
  sq_mask_ = *inside<unsigned>(queue_memory_, params.sq_off.ring_mask);
  cq_head_ = inside<unsigned>(queue_memory_, params.cq_off.head);
  cq_tail_ = inside<unsigned>(queue_memory_, params.cq_off.tail);
  cq_mask_ = *inside<unsigned>(queue_memory_, params.cq_off.ring_mask);
  completions_ = inside<io_uring_cqe>(queue_memory_, params.cq_off.cqes);
}

void Ring::register_tables() {
  // Empty tables that are filled later.  Where the kernel refuses them, nothing is registered.
  std::vector<int> none(kFiles, -1);
  if (control(ring_, IORING_REGISTER_FILES, none.data(), kFiles) >= 0) files_ = std::move(none);
  io_uring_rsrc_register sparse = {};
  sparse.nr = kMemories;
  sparse.flags = IORING_RSRC_REGISTER_SPARSE;
  if (control(ring_, IORING_REGISTER_BUFFERS2, &sparse, sizeof sparse) >= 0) {
    for (unsigned slot = kMemories; slot > 0; --slot) memory_slots_.push_back(slot - 1);
  }
}

void Ring::release() {
  if (entry_memory_ != nullptr) munmap(entry_memory_, entry_bytes_);
  if (queue_memory_ != nullptr) munmap(queue_memory_, queue_bytes_);
  if (wakes_ >= 0) close(wakes_);
  if (ring_ >= 0) close(ring_);
  entry_memory_ = queue_memory_ = nullptr;
  wakes_ = ring_ = -1;
}

void Ring::read(std::uint64_t tag, int file, std::uint64_t offset, std::vector<iovec> parts,
                bool direct) {
  if (idle_.empty()) throw std::logic_error("the ring is full");
  const unsigned index = idle_.back();
  idle_.pop_back();
  reads_[index] = Read{tag, file, offset, std::move(parts), 0, 0, direct};
  ++in_flight_;
  try {
    start(index);
  } catch (...) {
    idle_.push_back(index);
    --in_flight_;
    throw;
  }
}

void Ring::start(unsigned index) {
  Read& read = reads_[index];
  io_uring_sqe* entry = next_entry();
  entry->opcode = IORING_OP_READV;
  entry->fd = read.file;
  entry->off = read.offset + static_cast<std::uint64_t>(read.done);
  entry->addr = reinterpret_cast<std::uintptr_t>(&read.parts[read.part]);
  entry->len = static_cast<unsigned>(read.parts.size() - read.part);
  entry->user_data = index;
  const auto file = read.file < 0 ? files_.end()
                                  : std::find(files_.begin(), files_.end(), read.file);
  if (file != files_.end()) {
    entry->fd = static_cast<int>(file - files_.begin());
    entry->flags |= IOSQE_FIXED_FILE;
  }
  if (entry->len == 1) {
    const iovec& part = read.parts[read.part];
    const int slot = memory_slot(part);
    if (slot >= 0) {
      entry->opcode = IORING_OP_READ_FIXED;
      entry->addr = reinterpret_cast<std::uintptr_t>(part.iov_base);
      entry->len = static_cast<unsigned>(part.iov_len);
      entry->buf_index = static_cast<std::uint16_t>(slot);
    }
  }
  submit_entry();
}

io_uring_sqe* Ring::next_entry() {
  const unsigned slot = *sq_tail_ & sq_mask_;  // each entry is submitted before the next is made
  io_uring_sqe* entry = static_cast<io_uring_sqe*>(entry_memory_) + slot;
  std::memset(entry, 0, sizeof *entry);
  sq_array_[slot] = slot;
  return entry;
}

void Ring::submit_entry() {
  store(sq_tail_, *sq_tail_ + 1);
  for (;;) {
    const int result = enter(1, 0);
    if (result == 1) return;
    // EAGAIN and EBUSY: the kernel lacks memory for a request, or room for completions, for now.
    if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY) {
      store(sq_tail_, *sq_tail_ - 1);  // the kernel looks only inside of the call
      fail(-result, "io_uring_enter");
    }
    if (result != -EINTR) usleep(100);
  }
}

int Ring::enter(unsigned submit, unsigned least) {
  const unsigned flags = least != 0 ? IORING_ENTER_GETEVENTS : 0;
  const long result = syscall(SYS_io_uring_enter, ring_, submit, least, flags, nullptr, 0);
  return result < 0 ? -errno : static_cast<int>(result);
}

std::vector<Completion> Ring::wait() {
  std::vector<Completion> ended;
  for (;;) {
    if (!watching_) watch_wakes();
    if (reap(&ended) || !ended.empty()) return ended;
    const int result = enter(0, 1);
    if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY) {
      fail(-result, "io_uring_enter");
    }
  }
}

// Takes over what the kernel has completed; whether somebody called `wake`.
bool Ring::reap(std::vector<Completion>* ended) {
  bool woken = false;
  while (*cq_head_ != load(cq_tail_)) {
    const io_uring_cqe completion = completions_[*cq_head_ & cq_mask_];
    store(cq_head_, *cq_head_ + 1);
    if (completion.user_data == kWakeTag) {
      std::uint64_t count;
      if (::read(wakes_, &count, sizeof count) < 0 && errno != EAGAIN) fail(errno, "eventfd");
      watching_ = false;
      woken = true;
      continue;
    }
    const auto index = static_cast<unsigned>(completion.user_data);
    Read& read = reads_[index];
    if (advance(&read, completion.res)) {
      start(index);
      continue;
    }
    const std::int64_t result = completion.res < 0 ? completion.res : read.done;
    ended->push_back(Completion{read.tag, result});
    read.parts.clear();
    idle_.push_back(index);
    --in_flight_;
  }
  return woken;
}

// Counts what a read has brought; whether it has to go on.
bool Ring::advance(Read* read, std::int64_t result) {
  if (result == -EAGAIN || result == -EINTR) return true;
  if (result <= 0) return false;
  read->done += result;
  std::size_t left = static_cast<std::size_t>(result);
  while (read->part < read->parts.size() && left >= read->parts[read->part].iov_len) {
    left -= read->parts[read->part].iov_len;
    ++read->part;
  }
  if (read->part == read->parts.size()) return false;
  iovec& part = read->parts[read->part];
  part.iov_base = static_cast<char*>(part.iov_base) + left;
  part.iov_len -= left;
  return !read->direct || result % kAlignment == 0;
}

void Ring::watch_wakes() {
  io_uring_sqe* entry = next_entry();
  entry->opcode = IORING_OP_POLL_ADD;
  entry->fd = wakes_;
  entry->poll_events = POLLIN;
  entry->user_data = kWakeTag;
  submit_entry();
  watching_ = true;
}

void Ring::wake() {
  const std::uint64_t one = 1;
  // EAGAIN: it was woken 2^64 - 2 times and has not looked yet.
  if (write(wakes_, &one, sizeof one) < 0 && errno != EAGAIN) fail(errno, "eventfd");
}

bool Ring::add_file(int file) {
  const auto slot = std::find(files_.begin(), files_.end(), -1);
  if (slot == files_.end() || file < 0) return false;
  io_uring_files_update update = {};
  update.offset = static_cast<unsigned>(slot - files_.begin());
  update.fds = reinterpret_cast<std::uintptr_t>(&file);
  if (control(ring_, IORING_REGISTER_FILES_UPDATE, &update, 1) != 1) return false;
  *slot = file;
  return true;
}

void Ring::remove_file(int file) {
  const auto slot = std::find(files_.begin(), files_.end(), file);
  if (slot == files_.end() || file < 0) return;
  const int none = -1;
  io_uring_files_update update = {};
  update.offset = static_cast<unsigned>(slot - files_.begin());
  update.fds = reinterpret_cast<std::uintptr_t>(&none);
  control(ring_, IORING_REGISTER_FILES_UPDATE, &update, 1);
  *slot = -1;
}

bool Ring::add_memory(void* memory, std::size_t bytes) {
  const std::lock_guard<std::mutex> guard(memory_lock_);
  const auto key = reinterpret_cast<std::uintptr_t>(memory);
  if (memory_slots_.empty() || bytes > kMostMemoryBytes || memory_.count(key) != 0) return false;
  iovec range = {memory, bytes};
  io_uring_rsrc_update2 update = {};
  update.offset = memory_slots_.back();
  update.data = reinterpret_cast<std::uintptr_t>(&range);
  update.nr = 1;
  if (control(ring_, IORING_REGISTER_BUFFERS_UPDATE, &update, sizeof update) != 1) return false;
  memory_.emplace(key, Memory{bytes, update.offset});
  memory_slots_.pop_back();
  return true;
}

void Ring::remove_memory(void* memory) {
  const std::lock_guard<std::mutex> guard(memory_lock_);
  const auto found = memory_.find(reinterpret_cast<std::uintptr_t>(memory));
  if (found == memory_.end()) return;
  iovec none = {nullptr, 0};
  io_uring_rsrc_update2 update = {};
  update.offset = found->second.slot;
  update.data = reinterpret_cast<std::uintptr_t>(&none);
  update.nr = 1;
  control(ring_, IORING_REGISTER_BUFFERS_UPDATE, &update, sizeof update);
  memory_slots_.push_back(found->second.slot);
  memory_.erase(found);
}

int Ring::memory_slot(const iovec& part) {
  const std::lock_guard<std::mutex> guard(memory_lock_);
  const auto begin = reinterpret_cast<std::uintptr_t>(part.iov_base);
  auto after = memory_.upper_bound(begin);
  if (after == memory_.begin()) return -1;
  const auto& [start, memory] = *std::prev(after);
  const bool contained = begin + part.iov_len <= start + memory.bytes;
  return contained ? static_cast<int>(memory.slot) : -1;
}

}  // namespace hmt

#else

namespace hmt {

Ring::Ring(unsigned) {
  throw std::system_error(ENOSYS, std::generic_category(),
                          "HMT was built where Linux's headers have no io_uring");
}
Ring::~Ring() = default;
void Ring::read(std::uint64_t, int, std::uint64_t, std::vector<iovec>, bool) {}
std::vector<Completion> Ring::wait() { return {}; }
void Ring::wake() {}
bool Ring::add_file(int) { return false; }
void Ring::remove_file(int) {}
bool Ring::add_memory(void*, std::size_t) { return false; }
void Ring::remove_memory(void*) {}

}  // namespace hmt

#endif

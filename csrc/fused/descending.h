// Numbers with their indices, largest first, sorted only as far as they are looked at.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

namespace hmt {

// A number and its index as one integer: larger for a larger number, and for the lower index of two
// equal ones, as both zeros are.  Not for NaN.
inline uint64_t ranked(float value, std::size_t index) {
  value += 0.0f;  // no negative zero
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t{bits} << 32 | (0xffffffffu - static_cast<uint32_t>(index));
}
inline std::size_t ranked_index(uint64_t item) { return 0xffffffffu - static_cast<uint32_t>(item); }
inline uint32_t ranked_order(uint64_t item) { return static_cast<uint32_t>(item >> 32); }

// Spreads the items over buckets by their leading bits, and sorts a bucket when its turn comes.
class Descending {
 public:
  static constexpr std::size_t kBuckets = std::size_t{1} << 14;

  // `items` and `room` have `count` places, `ends` kBuckets; all are overwritten.
  Descending(uint64_t* items, std::size_t count, uint64_t* room, uint32_t* ends)
      : items_(items), count_(count), ends_(ends) {
    if (count <= kFew) {
      std::sort(items, items + count, std::greater<uint64_t>());
      sorted_ = count;
      return;
    }
    uint32_t least = ranked_order(items[0]), most = least;
    for (std::size_t i = 1; i < count; ++i) {
      least = std::min(least, ranked_order(items[i]));
      most = std::max(most, ranked_order(items[i]));
    }
    int shift = 0;
    while (((most - least) >> shift) >= kBuckets) ++shift;
    const auto bucket = [&](uint64_t item) { return (most - ranked_order(item)) >> shift; };
    std::fill(ends, ends + kBuckets, 0u);
    for (std::size_t i = 0; i < count; ++i) ++ends[bucket(items[i])];
    uint32_t begin = 0;
    for (std::size_t b = 0; b < kBuckets; ++b) {
      const uint32_t here = ends[b];
      ends[b] = begin;
      begin += here;
    }
    for (std::size_t i = 0; i < count; ++i) room[ends[bucket(items[i])]++] = items[i];
    items_ = room;
  }

  std::size_t size() const { return count_; }

  // The item at `place`, counted from the largest.
  uint64_t at(std::size_t place) {
    while (place >= sorted_) {
      const std::size_t end = ends_[bucket_++];
      uint64_t* first = items_ + sorted_;
      uint64_t* last = items_ + end;
      // Equal numbers come by index, hence sorted, already.
      if (!std::is_sorted(first, last, std::greater<uint64_t>())) {
        std::sort(first, last, std::greater<uint64_t>());
      }
      sorted_ = end;
    }
    return items_[place];
  }

 private:
  static constexpr std::size_t kFew = 256;
  uint64_t* items_;
  std::size_t count_;
  uint32_t* ends_;
  std::size_t sorted_ = 0, bucket_ = 0;
};

}  // namespace hmt

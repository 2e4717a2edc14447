#include "fused/streams.h"

#include "fused/float_convert.h"

namespace hmt::HMT_ISA {
namespace {

template <typename Numbers>
void read_as(const Streams& call, size_t begin, size_t end) {
  using Type = typename Numbers::Type;
  for (size_t t = begin; t < end; ++t) {
    const Type* rows = static_cast<const Type*>(call.rows) + t * call.streams * call.width;
    const float* weights = call.weights + t * call.streams;
    Type* x = static_cast<Type*>(call.x) + t * call.width;
    for (size_t i = 0; i < call.width; i += 16) {
      const size_t count = call.width - i < 16 ? call.width - i : 16;
      F16v total = zero();
      for (size_t k = 0; k < call.streams; ++k) {
        const F16v stream = read<Numbers>(rows + k * call.width + i, count);
        total = add(total, mul(set1(weights[k]), stream));
      }
      write<Numbers>(x + i, count, Numbers::round(total));
    }
  }
}

template <typename Numbers>
void write_as(const Streams& call, size_t begin, size_t end) {
  using Type = typename Numbers::Type;
  for (size_t t = begin; t < end; ++t) {
    const size_t n = call.streams, row = n * call.width;
    const Type* rows = static_cast<const Type*>(call.rows) + t * row;
    const float* weights = call.weights + t * n;
    const float* mixed = call.mixed + t * n * n;
    const Type* x = static_cast<const Type*>(call.x) + t * call.width;
    Type* out = static_cast<Type*>(call.out) + t * row;
    for (size_t i = 0; i < call.width; i += 16) {
      const size_t count = call.width - i < 16 ? call.width - i : 16;
      const F16v given = read<Numbers>(x + i, count);
      for (size_t k = 0; k < n; ++k) {
        F16v total = mul(set1(weights[k]), given);
        for (size_t j = 0; j < n; ++j) {
          const F16v stream = read<Numbers>(rows + j * call.width + i, count);
          total = add(total, mul(set1(mixed[j * n + k]), stream));
        }
        write<Numbers>(out + k * call.width + i, count, Numbers::round(total));
      }
    }
  }
}

void read_rows(const Streams& call, size_t begin, size_t end) {
  with_numbers(call.type, [&](auto numbers) { read_as<decltype(numbers)>(call, begin, end); });
}

void write_rows(const Streams& call, size_t begin, size_t end) {
  with_numbers(call.type, [&](auto numbers) { write_as<decltype(numbers)>(call, begin, end); });
}

}  // namespace

const StreamKernels stream_kernels = {read_rows, write_rows};

}  // namespace hmt::HMT_ISA

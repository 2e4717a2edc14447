// Types of numbers in memory that callers may hand over.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hmt {

enum class DType : int { kF32, kBF16, kF16 };

inline std::size_t bytes_of(DType type) { return type == DType::kF32 ? 4 : 2; }

// A matrix of numbers: row i begins at data + i * stride numbers.
struct ConstMatrix {
  const void* data;
  DType type;
  std::size_t rows, columns, stride;
};
struct Matrix {
  void* data;
  DType type;
  std::size_t rows, columns, stride;
};

}  // namespace hmt

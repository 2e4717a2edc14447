// Codes of 4 bits brought into panels, as kernels read them: Packing.PANELS of
// contracts/encoding.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hmt {

// `paired` codes lie two in a byte, the low nibble first, else each in a byte of its own; rows are
// `stride` bytes apart, and `columns` is a multiple of 32.  Writes all of
// panels [ceil(rows / 16), columns / 32, 4, 16, 4], with zeros for rows that do not exist.
void pack_panels(const std::uint8_t* codes, std::size_t rows, std::size_t columns,
                 std::size_t stride, bool paired, std::uint8_t* panels);

// The same of AutoAWQ's words: words[column * stride + row / 8] has the codes of eight rows, whose
// nibbles, lowest first, are those of rows 0, 2, 4, 6, 1, 3, 5 and 7.
void pack_awq(const std::uint32_t* words, std::size_t rows, std::size_t columns,
              std::size_t stride, std::uint8_t* panels, std::size_t threads);

}  // namespace hmt

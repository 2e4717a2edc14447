// AMX's eight tile registers.  Only for *.isa.cpp.
#pragma once

#include "simd/vec.h"
#if defined(HMT_EMULATED_TILES)
#include "simd/tiles_emulated.h"
#endif

namespace hmt::HMT_ISA {

// What LDTILECFG reads; registers are 16 rows of 64 bytes each unless it says otherwise.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileShapes) == 64, "what LDTILECFG reads");

// GCC's tile intrinsics do not say which memory they read, and some not which they write; without
// these the compiler may leave out what was written there.
HMT_INLINE void settle_tile_memory() { __asm__ volatile("" ::: "memory"); }
HMT_INLINE void settle_tile_memory(const void* memory) {
  __asm__ volatile("" : : "r"(memory) : "memory");
}

// While one exists, its thread's tile registers have these shapes.
class Tiles {
 public:
  explicit Tiles(const TileShapes& shapes = {}) {
    settle_tile_memory(&shapes);
    _tile_loadconfig(&shapes);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

}  // namespace hmt::HMT_ISA

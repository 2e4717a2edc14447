#include "base/isa.h"

#include <atomic>

#ifdef HMT_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hmt {
namespace {

#ifdef HMT_X86
#if defined(HMT_EMULATED_TILES)
bool has_amx() { return true; }
#else
bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
  if ((d & kBf16) == 0 || (d & kTile) == 0 || (d & kInt8) == 0) return false;
  // Linux hands out the 8 KiB of tile registers only to processes that ask.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

bool supports(Isa isa) {
  __builtin_cpu_init();
  switch (isa) {
    case Isa::kPortable:
      return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::kAvx512:
      return supports(Isa::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    case Isa::kAvx512Bf16:
      return supports(Isa::kAvx512) && __builtin_cpu_supports("avx512bf16") &&
             __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni");
    case Isa::kAmx:
      return supports(Isa::kAvx512Bf16) && has_amx();
  }
  return false;
}
#else
bool supports(Isa isa) { return isa == Isa::kPortable; }
#endif

Isa best() {
  Isa found = Isa::kPortable;
  for (std::size_t i = 0; i < kIsas; ++i) {
#if defined(HMT_EMULATED_TILES)
    if (static_cast<Isa>(i) == Isa::kAmx) break;  // slow: only where a test asks for it
#endif
    if (runs(static_cast<Isa>(i))) found = static_cast<Isa>(i);
  }
  return found;
}

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> isa{best()};
  return isa;
}

}  // namespace

const char* name_of(Isa isa) {
  constexpr const char* kNames[kIsas] = {"portable", "avx2", "avx512", "avx512-bf16", "amx"};
  return kNames[static_cast<std::size_t>(isa)];
}

bool reads_far_ahead() {
#ifdef HMT_X86
  static const bool far = [] {
    __builtin_cpu_init();
    return !__builtin_cpu_is("intel");
  }();
  return far;
#else
  return true;
#endif
}

bool runs(Isa isa) {
#ifdef HMT_SANITIZED
  if (isa == Isa::kAvx2 || isa == Isa::kAvx512) return false;
#endif
  static const std::array<bool, kIsas> found = [] {
    std::array<bool, kIsas> all{};
    for (std::size_t i = 0; i < kIsas; ++i) all[i] = supports(static_cast<Isa>(i));
    return all;
  }();
  return found[static_cast<std::size_t>(isa)];
}

Isa isa() { return chosen().load(std::memory_order_relaxed); }

void set_isa(Isa isa) { chosen().store(isa, std::memory_order_relaxed); }

}  // namespace hmt

// Instruction sets: which ones kernels are compiled for, which of them run here, which one is used.
//
// A source file called *.isa.cpp is compiled once for each instruction set, with its compiler flags
// and with HMT_ISA defined as the name of a namespace (portable, avx2, ...).  It defines one table
// of function pointers in that namespace; HMT_TABLES declares all of them, and `active` picks one:
//
//     struct NormKernels { void (*rms_norm)(...); };
//     HMT_TABLES(NormKernels, norm_kernels)               // in the header
//     namespace hmt::HMT_ISA { const NormKernels norm_kernels = {rms_norm}; }   // in norm.isa.cpp
//     active(norm_kernel_tables()).rms_norm(...);         // where it is called
//
// Of AMX there are the files whose kernels use tiles (CMakeLists.txt names them); other kernels of
// that level are those of the level below.
//
// Inside, `#if HMT_AVX512` and so on choose intrinsics.  Everything in a *.isa.cpp lies in
// hmt::HMT_ISA, so that the linker never mixes versions; inline functions of the standard library
// that are shared with other files must not be called in there (std::min and the like get inlined).
#pragma once

#include <array>
#include <cstddef>

namespace hmt {

// In ascending order; each one includes those before it.
enum class Isa : int {
  kPortable,
  kAvx2,        // AVX2, FMA, F16C
  kAvx512,      // AVX-512 F, BW, DQ, VL and VNNI
  kAvx512Bf16,  // and BF16, VBMI and GFNI
  kAmx,         // and AMX tiles of int8 and bf16
};
constexpr std::size_t kIsas = 5;

const char* name_of(Isa isa);

// True where this build has it, this processor runs it, and the kernel grants its registers.
bool runs(Isa isa);

// The best one that runs, until set_isa says otherwise.
Isa isa();

// Use another one; it must run.  Not while kernels run.
void set_isa(Isa isa);

// Whether this processor's own prefetching keeps up with one core that reads in order.
bool reads_far_ahead();

template <typename Table>
using Tables = std::array<const Table*, kIsas>;

template <typename Table>
const Table& active(Tables<Table> tables) {
  auto level = static_cast<std::size_t>(isa());
  while (tables[level] == nullptr) --level;
  return *tables[level];
}

}  // namespace hmt

#if defined(HMT_X86) && defined(HMT_SANITIZED)
// Builds with sanitizers leave out what is nearly the same code: they would take three times as long.
#define HMT_TABLES(Type, name)                                                              \
  namespace portable { extern const Type name; }                                            \
  namespace avx512_bf16 { extern const Type name; }                                         \
  namespace amx { extern const Type name __attribute__((weak)); }                           \
  inline Tables<Type> name##_tables() {                                                     \
    return {&portable::name, nullptr, nullptr, &avx512_bf16::name, &amx::name};             \
  }
#elif defined(HMT_X86)
#define HMT_TABLES(Type, name)                                                              \
  namespace portable { extern const Type name; }                                            \
  namespace avx2 { extern const Type name; }                                                \
  namespace avx512 { extern const Type name; }                                              \
  namespace avx512_bf16 { extern const Type name; }                                         \
  namespace amx { extern const Type name __attribute__((weak)); }                           \
  inline Tables<Type> name##_tables() {                                                     \
    return {&portable::name, &avx2::name, &avx512::name, &avx512_bf16::name, &amx::name};   \
  }
#else
#define HMT_TABLES(Type, name)                                                              \
  namespace portable { extern const Type name; }                                            \
  inline Tables<Type> name##_tables() {                                                     \
    return {&portable::name, &portable::name, &portable::name, &portable::name,             \
            &portable::name};                                                               \
  }
#endif

// What a *.isa.cpp may use.
#ifdef __AVX2__
#define HMT_AVX2 1
#endif
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define HMT_AVX512 1
#endif
#if defined(HMT_AVX512) && defined(__AVX512BF16__)
#define HMT_AVX512_BF16 1
#endif
#if defined(HMT_AVX512) && defined(__AVX512VBMI__) && defined(__GFNI__)
#define HMT_VBMI 1
#endif
#if defined(HMT_AVX512_BF16) && defined(__AMX_INT8__)
#define HMT_AMX 1
#endif

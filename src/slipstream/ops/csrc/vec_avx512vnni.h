/* AVX-512 with dot products of bytes (Cascade Lake, Ice Lake), for the decoder only; bf16 is converted to fp32. */
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")))
#define DOTS_BF16 0
#include "vec_avx512.h"
#include "vec_vnni.h"

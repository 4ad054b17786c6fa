// Attention of one token's 64 heads over its window and compressed entries, for compute capability
// 9.0: rows of 512 dims, the last 64 rotated and in bfloat16. See entry_attention.py for what it
// computes; this file is about how.
//
// A block takes a split of a token's list, 64 rows at a time. Its third warpgroup reads rows and
// writes them decoded into one of two buffers; the others do both products of a buffer, each for
// half of the output's dims. Both form the logits, which costs a third more products and saves an
// exchange of weights. Splits of a token are a cluster and add up through its shared memory, in
// their order.
//
// Compiled with FORMAT (0 bfloat16; 1 e4m3 with a scale a row; 2 e4m3 with an exponent for each 64)
// and SPLITS (1, 2, 4, 8).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int DIM = 512;
constexpr int TILE = 64;            // rows of a buffer, and heads of a block
constexpr int COLUMNS = DIM / 64;   // of 64 dims: 128 bytes a row, the swizzle's width
constexpr int COLUMN = TILE * 128;  // bytes
constexpr int BUFFER = COLUMNS * COLUMN;
constexpr int CONSUMERS = 256;
constexpr int PART_ROW = DIM + 8;   // floats; the 8 keep rows in different banks
constexpr float WEIGHT_SCALE = FORMAT == 1 ? 512.0f : 1.0f;  // a scale is about a row's 448th

constexpr int Q_AT = 0;
constexpr int ROWS_AT = BUFFER;
constexpr int SCALES_AT = ROWS_AT + 2 * BUFFER;
constexpr int STATS_AT = SCALES_AT + 2 * TILE * 4;
constexpr int BARRIERS_AT = STATS_AT + 2 * TILE * 4;
constexpr int STAGING_AT = BARRIERS_AT + 32;
constexpr int STAGE = 7 * 128 * 16;

struct Rows {
  const u8 *values, *rope, *scales;
  i64 values_place, values_row, rope_place, rope_row, scales_place, scales_row;  // bytes
};

struct Arguments {
  Rows window, entries;
  const u16 *q;
  const int *slots, *positions, *table, *selected;
  const float *sinks, *cos, *sin;
  u16 *out;
  i64 q_token, q_head, table_stride;  // elements
  int heads, window_size, ring, compression, held, top_k, min_tiles;
  float factor;
};

__device__ __forceinline__ u32 shared_address(const void *pointer) {
  return (u32)__cvta_generic_to_shared(pointer);
}

// --- barriers -----------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 at, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 at) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 at, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\nbra again;\nover:\n}" ::"r"(at), "r"(parity) : "memory");
}

// What threads stored, the tensor cores may read after the next barrier.
__device__ __forceinline__ void publish_to_tensor_cores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" :::
               "memory");
}

// --- numbers ------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ u32 half_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ u32 bfloat_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ u32 half_pair_of_codes(u32 codes) {
  u32 pair;
  asm("{\n.reg .b16 low;\ncvt.u16.u32 low, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}"
      : "=r"(pair) : "r"(codes));
  return pair;
}

__device__ __forceinline__ u32 half_pair_product(u32 a, u32 b) {
  u32 pair;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

// --- products -----------------------------------------------------------------------------------

// A swizzled tile whose groups of 8 lines are 1024 bytes apart.
__device__ __forceinline__ u64 descriptor(u32 at) {
  return (u64)((at & 0x3FFFF) >> 4) | ((u64)1 << 16) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 62);
}

#define LIST8(a, i) \
  "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3]), "+f"(a[i + 4]), "+f"(a[i + 5]), \
      "+f"(a[i + 6]), "+f"(a[i + 7])
#define LIST32(a) LIST8(a, 0), LIST8(a, 8), LIST8(a, 16), LIST8(a, 24)
#define NAMES32                                                                              \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "  \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"

// acc [64 x 64] += a [64 x 16] * b [16 x 64]; a from shared memory, b's lines are its columns.
template <bool BFLOAT>
__device__ __forceinline__ void multiply(float *acc, u64 a, u64 b, int accumulate) {
  if constexpr (BFLOAT) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " NAMES32
        ", %32, %33, p, 1, 1, 0, 0;\n}"
        : LIST32(acc) : "l"(a), "l"(b), "r"(accumulate));
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " NAMES32
        ", %32, %33, p, 1, 1, 0, 0;\n}"
        : LIST32(acc) : "l"(a), "l"(b), "r"(accumulate));
  }
}

// The same with a in registers, and b's lines its rows.
template <bool BFLOAT>
__device__ __forceinline__ void multiply_weights(float *acc, const u32 *a, u64 b) {
  if constexpr (BFLOAT) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " NAMES32
        ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
        : LIST32(acc) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " NAMES32
        ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
        : LIST32(acc) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}

__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_end() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// --- a token's list -----------------------------------------------------------------------------

struct List {
  int in_window, entries, window_tiles, begin, end, splits;

  // As _list_of in entry_attention.py.
  __device__ List(const Arguments &arguments, int position, int split) {
    in_window = min(position + 1, arguments.window_size);
    window_tiles = (in_window + TILE - 1) / TILE;
    entries = 0;
    if (arguments.compression > 0) {
      entries = (position + 1) / arguments.compression;
      if (arguments.top_k > 0) entries = min(entries, arguments.top_k);
    }
    int tiles = window_tiles + (entries + TILE - 1) / TILE;
    int per_split = max((tiles + SPLITS - 1) / SPLITS, arguments.min_tiles);
    if (SPLITS == 1) per_split = tiles;
    splits = (tiles + per_split - 1) / per_split;
    begin = split * per_split;
    end = min(begin + per_split, tiles);
  }

  __device__ int rows_of(int tile) const {
    return tile < window_tiles ? min(TILE, in_window - tile * TILE)
                               : min(TILE, entries - (tile - window_tiles) * TILE);
  }
};

__device__ __forceinline__ u32 swizzled(int column, int row, int unit) {
  return column * COLUMN + row * 128 + ((unit ^ (row & 7)) << 4);
}

__device__ __forceinline__ void store16(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// --- the warpgroup that reads -------------------------------------------------------------------

// Four threads share a row, and a pass is 32 rows: half a tile. Entries are looked up four passes
// ahead and their blocks three, so that no pass waits for one look-up after the other.
//
// Codes are copied two passes ahead into memory of the thread's own. Not into registers: a warp has
// six counters of loads, and waiting for one waits for all later loads that share it. Bfloat16 rows
// are copied to where the products read them.
struct Reader {
  static constexpr bool CODES = FORMAT != 0;
  static constexpr int CHUNKS = CODES ? 7 : 16;  // of 16 bytes, for each thread

  const Arguments &arguments;
  const List &list;
  const u32 own;
  int slot, position, token, group, part, passes;
  int place_entry, place, entry;
  // Of the pass located last.
  const u8 *values, *rope, *scales;
  bool there;
  // Of the pass to decode.
  uint4 rotated[2];
  u32 scale[2];

  __device__ Reader(const Arguments &arguments, const List &list, u32 base, int slot, int position,
                    int token, int thread)
      : arguments(arguments), list(list), own(base + STAGING_AT + thread * 16), slot(slot),
        position(position), token(token), group(thread >> 2), part(thread & 3),
        passes(2 * (list.end - list.begin)) {
    int entries[3] = {entry_of(0), entry_of(1), entry_of(2)};
    int places[2] = {place_of(entries[0]), place_of(entries[1])};
    locate(0, entries[0], places[0]);
    if (CODES) {
      copy(0);
      load_rest();
      locate(1, entries[1], places[1]);
      copy(1);
      place_entry = entries[2], place = place_of(entries[2]);
      entry = entry_of(3);
    } else {
      place_entry = entries[1], place = places[1];
      entry = entries[2];
    }
  }

  __device__ int row_of(int pass) const { return group + 32 * (pass & 1); }
  __device__ int tile_of(int pass) const { return list.begin + (pass >> 1); }

  __device__ bool inside(int pass) const {
    return pass < passes && row_of(pass) < list.rows_of(tile_of(pass));
  }

  __device__ int entry_of(int pass) const {
    int tile = tile_of(pass) - list.window_tiles;
    if (tile < 0 || !inside(pass)) return 0;
    int at = tile * TILE + row_of(pass);
    return arguments.top_k > 0 ? arguments.selected[(i64)token * arguments.top_k + at] : at;
  }

  __device__ int place_of(int entry) const {
    if (arguments.compression == 0) return 0;
    return arguments.table[slot * arguments.table_stride + entry / arguments.held];
  }

  __device__ void locate(int pass, int entry, int place) {
    there = inside(pass);
    bool window = tile_of(pass) < list.window_tiles;
    const Rows &rows = window || !there ? arguments.window : arguments.entries;
    i64 at = window || !there ? slot : place;
    int first = position + 1 - list.in_window;
    i64 row = window ? (first + tile_of(pass) * TILE + row_of(pass)) % arguments.ring
                     : entry % arguments.held;
    if (!there) row = 0;
    values = rows.values + at * rows.values_place + row * rows.values_row + part * 16;
    if (CODES) {
      rope = rows.rope + at * rows.rope_place + row * rows.rope_row + part * 32;
      scales = rows.scales + at * rows.scales_place + row * rows.scales_row;
    }
  }

  __device__ void locate_next(int pass) {
    locate(pass, place_entry, place);
    place_entry = entry, place = place_of(entry);
    entry = entry_of(pass + 2);
  }

  // Zeros where no row is: memory that was never written may hold NaN, which no weight masks.
  __device__ void copy16(u32 to, int chunk) const {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(values + chunk * 64),
                 "r"(there ? 16 : 0) : "memory");
  }

  __device__ void copy(int pass) const {
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) copy16(own + (pass & 1) * STAGE + j * 2048, j);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  template <int LATER>
  __device__ static void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
  }

  __device__ void load_rest() {
#pragma unroll
    for (int j = 0; j < 2; ++j)
      rotated[j] = there ? *(const uint4 *)(rope + j * 16) : make_uint4(0, 0, 0, 0);
    scale[0] = scale[1] = 0;
    if (FORMAT == 1 && there) scale[0] = *(const u32 *)scales;
    if (FORMAT == 2 && there) {
      scale[0] = *(const u32 *)scales;
      scale[1] = (u32)scales[4] | (u32)scales[5] << 8 | (u32)scales[6] << 16;
    }
  }

  // A pass of codes into `buffer`; the copies of the pass after the next begin.
  __device__ void decode(int pass, u32 buffer, u32 scales_at) {
    int row = row_of(pass);
    wait_for_copies<1>();
#pragma unroll
    for (int j = 0; j < 7; ++j) {
      u32 codes[4], half[8];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(codes[0]), "=r"(codes[1]), "=r"(codes[2]), "=r"(codes[3])
                   : "r"(own + (pass & 1) * STAGE + j * 2048) : "memory");
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        half[2 * k] = half_pair_of_codes(codes[k]);
        half[2 * k + 1] = half_pair_of_codes(codes[k] >> 16);
      }
      if constexpr (FORMAT == 2) {
        u32 exponent = (scale[j >> 2] >> (8 * (j & 3))) & 0xFF;
        float power = __uint_as_float(exponent << 23);
        u32 pair = half_pair(power, power);
#pragma unroll
        for (int k = 0; k < 8; ++k) half[k] = half_pair_product(half[k], pair);
      }
      store16(buffer + swizzled(j, row, part * 2), half[0], half[1], half[2], half[3]);
      store16(buffer + swizzled(j, row, part * 2 + 1), half[4], half[5], half[6], half[7]);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j)
      store16(buffer + swizzled(COLUMNS - 1, row, part * 2 + j), rotated[j].x, rotated[j].y,
              rotated[j].z, rotated[j].w);
    if (FORMAT == 1 && part == 0)
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(scales_at + row * 4), "r"(scale[0]) : "memory");
    load_rest();
    locate_next(pass + 2);
    copy(pass);
  }

  // A pass of bfloat16 rows: its copies into `buffer` begin.
  __device__ void fill(int pass, u32 buffer) {
    int row = row_of(pass);
#pragma unroll
    for (int j = 0; j < 16; ++j)
      copy16(buffer + swizzled(j >> 1, row, (j & 1) * 4 + part), j);
    if (pass & 1) asm volatile("cp.async.commit_group;" ::: "memory");
    locate_next(pass + 1);
  }

  __device__ void run(u32 base) {
    const u32 full = base + BARRIERS_AT, empty = full + 16;
    for (int pass = 0; pass < passes; ++pass) {
      const int turn = pass >> 1, buffer = turn & 1;
      const u32 rows = base + ROWS_AT + buffer * BUFFER;
      if ((pass & 1) == 0) barrier_wait(empty + 8 * buffer, ((turn >> 1) & 1) ^ 1);
      if constexpr (CODES) {
        decode(pass, rows, base + SCALES_AT + buffer * TILE * 4);
        if (pass & 1) {
          publish_to_tensor_cores();
          barrier_arrive(full + 8 * buffer);
        }
      } else {
        fill(pass, rows);
        if ((pass & 1) && turn > 0) {
          wait_for_copies<1>();
          publish_to_tensor_cores();
          barrier_arrive(full + 8 * (buffer ^ 1));
        }
      }
    }
    if constexpr (!CODES) {
      wait_for_copies<0>();
      publish_to_tensor_cores();
      barrier_arrive(full + 8 * ((passes / 2 - 1) & 1));
    }
  }
};

// --- the warpgroups that multiply ---------------------------------------------------------------

// The first half of the output's dims, or with ROTATED the second, whose last 64 are the rotated.
template <bool ROTATED>
__device__ __forceinline__ void attend_half(const Arguments &arguments, const List &list, u8 *shared,
                                            u32 base, int thread, int token, int first_head,
                                            u16 *out) {
  constexpr int FIRST_COLUMN = ROTATED ? 4 : 0;
  const u32 full = base + BARRIERS_AT, empty = full + 16;
          const int lane = thread & 31;
      const int line = ((thread >> 5) & 3) * 16 + (lane >> 2);  // this thread's heads: it and 8 on
      const int pair = (lane & 3) * 2;                          // its columns: 8 j + pair, and 1 on
      if (list.begin < list.end) {
        const u16 *q = arguments.q + (i64)token * arguments.q_token + first_head * arguments.q_head;
        for (int i = thread; i < TILE * DIM / 8; i += CONSUMERS) {
          int row = i >> 6, unit = i & 63;
          uint4 raw = *(const uint4 *)(q + row * arguments.q_head + unit * 8);
          if (FORMAT != 0 && unit < 56) {
            u32 *words = (u32 *)&raw;
  #pragma unroll
            for (int k = 0; k < 4; ++k)
              words[k] = half_pair(__uint_as_float(words[k] << 16),
                                   __uint_as_float(words[k] & 0xFFFF0000));
          }
          store16(base + Q_AT + swizzled(unit >> 3, row, unit & 7), raw.x, raw.y, raw.z, raw.w);
        }
      }
      publish_to_tensor_cores();
      asm volatile("bar.sync 1, 256;" ::: "memory");

      float acc[4][32];
  #pragma unroll
      for (int column = 0; column < 4; ++column)
  #pragma unroll
        for (int i = 0; i < 32; ++i) acc[column][i] = 0;
      const float infinity = __int_as_float(0x7F800000);
      float most[2] = {-infinity, -infinity}, weights[2] = {0, 0};
      for (int tile = list.begin; tile < list.end; ++tile) {
        const int turn = tile - list.begin, buffer = turn & 1;
        const u32 rows = base + ROWS_AT + buffer * BUFFER;
        const float *scales = (const float *)(shared + SCALES_AT) + buffer * TILE;
        const int count = list.rows_of(tile);
        barrier_wait(full + 8 * buffer, (turn >> 1) & 1);

        float logits[32];
        products_begin();
  #pragma unroll
        for (int column = 0; column < COLUMNS - 1; ++column)
  #pragma unroll
          for (int k = 0; k < 4; ++k)
            multiply<FORMAT == 0>(logits, descriptor(base + Q_AT + column * COLUMN + k * 32),
                                  descriptor(rows + column * COLUMN + k * 32), column + k > 0);
        if constexpr (FORMAT == 1) {
          products_end();
  #pragma unroll
          for (int j = 0; j < 8; ++j) {
            float2 scale = *(const float2 *)(scales + 8 * j + pair);
            logits[4 * j] *= scale.x, logits[4 * j + 1] *= scale.y;
            logits[4 * j + 2] *= scale.x, logits[4 * j + 3] *= scale.y;
          }
          products_begin();
        }
  #pragma unroll
        for (int k = 0; k < 4; ++k)
          multiply<true>(logits, descriptor(base + Q_AT + (COLUMNS - 1) * COLUMN + k * 32),
                         descriptor(rows + (COLUMNS - 1) * COLUMN + k * 32), 1);
        products_end();

        float top[2] = {most[0], most[1]};
  #pragma unroll
        for (int j = 0; j < 8; ++j)
  #pragma unroll
          for (int i = 0; i < 4; ++i) {
            float &logit = logits[4 * j + i];
            logit = 8 * j + pair + (i & 1) < count ? logit * arguments.factor : -infinity;
            top[i >> 1] = fmaxf(top[i >> 1], logit);
          }
        float shrink[2];
  #pragma unroll
        for (int i = 0; i < 2; ++i) {
          top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 1));
          top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 2));
          shrink[i] = exp2_of(most[i] - top[i]);
          weights[i] *= shrink[i];
          most[i] = top[i];
        }
        // A thread's products are sums over rows, so its weights are its operand as they lie.
        u32 fixed[16], rotated[16];
  #pragma unroll
        for (int j = 0; j < 8; ++j) {
          float weight[4];
  #pragma unroll
          for (int i = 0; i < 4; ++i) {
            weight[i] = exp2_of(logits[4 * j + i] - top[i >> 1]);
            weights[i >> 1] += weight[i];
          }
          rotated[2 * j] = bfloat_pair(weight[0], weight[1]);
          rotated[2 * j + 1] = bfloat_pair(weight[2], weight[3]);
          if constexpr (FORMAT == 1) {
            float2 scale = *(const float2 *)(scales + 8 * j + pair);
            scale.x *= WEIGHT_SCALE, scale.y *= WEIGHT_SCALE;
            weight[0] *= scale.x, weight[1] *= scale.y, weight[2] *= scale.x, weight[3] *= scale.y;
          }
          if constexpr (FORMAT != 0) {
            fixed[2 * j] = half_pair(weight[0], weight[1]);
            fixed[2 * j + 1] = half_pair(weight[2], weight[3]);
          }
        }
  #pragma unroll
        for (int column = 0; column < 4; ++column)
  #pragma unroll
          for (int i = 0; i < 32; ++i) acc[column][i] *= shrink[(i >> 1) & 1];
        products_begin();
  #pragma unroll
        for (int k = 0; k < 4; ++k) {
          u32 at = rows + FIRST_COLUMN * COLUMN + k * 2048;
  #pragma unroll
          for (int column = 0; column < 3; ++column) {
            if constexpr (FORMAT == 0)
              multiply_weights<true>(acc[column], rotated + 4 * k, descriptor(at + column * COLUMN));
            else
              multiply_weights<false>(acc[column], fixed + 4 * k, descriptor(at + column * COLUMN));
          }
          if (FORMAT == 0 || ROTATED)
            multiply_weights<true>(acc[3], rotated + 4 * k, descriptor(at + 3 * COLUMN));
          else
            multiply_weights<false>(acc[3], fixed + 4 * k, descriptor(at + 3 * COLUMN));
        }
        products_end();
        barrier_arrive(empty + 8 * buffer);
      }
  #pragma unroll
      for (int i = 0; i < 2; ++i) {
        weights[i] += __shfl_xor_sync(~0u, weights[i], 1);
        weights[i] += __shfl_xor_sync(~0u, weights[i], 2);
      }

      if constexpr (SPLITS == 1) {
        float gain[2];
  #pragma unroll
        for (int i = 0; i < 2; ++i) {
          float sink = arguments.sinks[first_head + line + 8 * i] * 1.4426950408889634f;
          float top = fmaxf(most[i], sink);
          float shrink = exp2_of(most[i] - top);
          gain[i] = shrink / (weights[i] * shrink + exp2_of(sink - top));
        }
  #pragma unroll
        for (int column = 0; column < 4; ++column) {
          bool turned = ROTATED && column == 3;
  #pragma unroll
          for (int j = 0; j < 8; ++j)
  #pragma unroll
            for (int i = 0; i < 2; ++i) {
              float fold = turned ? 1.0f : 1.0f / WEIGHT_SCALE;
              float even = acc[column][4 * j + 2 * i] * gain[i] * fold;
              float odd = acc[column][4 * j + 2 * i + 1] * gain[i] * fold;
              if (turned) {
                float cosine = arguments.cos[token * 32 + 4 * j + (pair >> 1)];
                float sine = arguments.sin[token * 32 + 4 * j + (pair >> 1)];
                float x = even * cosine + odd * sine, y = odd * cosine - even * sine;
                even = x, odd = y;
              }
              u16 *at = out + (line + 8 * i) * DIM + (FIRST_COLUMN + column) * 64 + 8 * j + pair;
              *(u32 *)at = bfloat_pair(even, odd);
            }
        }
      } else {
        // Both warpgroups are done with the queries and the rows; the parts go over them.
        asm volatile("bar.sync 1, 256;" ::: "memory");
        float *parts = (float *)shared;
        float *stats = (float *)(shared + STATS_AT);
  #pragma unroll
        for (int column = 0; column < 4; ++column) {
          float fold = ROTATED && column == 3 ? 1.0f : 1.0f / WEIGHT_SCALE;
  #pragma unroll
          for (int j = 0; j < 8; ++j)
  #pragma unroll
            for (int i = 0; i < 2; ++i) {
              float2 two = make_float2(acc[column][4 * j + 2 * i] * fold,
                                       acc[column][4 * j + 2 * i + 1] * fold);
              int dim = (FIRST_COLUMN + column) * 64 + 8 * j + pair;
              *(float2 *)(parts + (line + 8 * i) * PART_ROW + dim) = two;
            }
        }
        if (!ROTATED && pair == 0) {
  #pragma unroll
          for (int i = 0; i < 2; ++i) {
            stats[line + 8 * i] = most[i];
            stats[TILE + line + 8 * i] = weights[i];
          }
        }
        asm volatile("bar.sync 2, 384;" ::: "memory");
      }
}

// --- the kernel ---------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(384, 1)
    attend(const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared);
  const int thread = threadIdx.x;
  const int token = blockIdx.x / SPLITS;
  const int split = blockIdx.x % SPLITS;
  const int first_head = blockIdx.y * TILE;
  const int slot = arguments.slots[token];
  const int position = arguments.positions[token];
  u16 *out = arguments.out + ((i64)token * arguments.heads + first_head) * DIM;
  if (slot < 0) {
    if (split == 0)
      for (int i = thread; i < TILE * DIM / 8; i += blockDim.x)
        ((uint4 *)out)[i] = make_uint4(0, 0, 0, 0);
    return;
  }
  const List list(arguments, position, split);
  const u32 full = base + BARRIERS_AT, empty = full + 16;
  if (thread == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(full + 8 * i, 128);
      barrier_init(empty + 8 * i, CONSUMERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (thread >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FORMAT == 0 ? 104 : 88));
    if (list.begin < list.end) {
      Reader reader(arguments, list, base, slot, position, token, thread - CONSUMERS);
      reader.run(base);
    }
    if (SPLITS > 1) asm volatile("bar.arrive 2, 384;" ::: "memory");
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(FORMAT == 0 ? 200 : 208));
    if (thread < 128)
      attend_half<false>(arguments, list, shared, base, thread, token, first_head, out);
    else
      attend_half<true>(arguments, list, shared, base, thread, token, first_head, out);
  }

  if constexpr (SPLITS > 1) {
    cluster_sync();
    constexpr int SHARE = TILE / SPLITS;
    const int lane = thread & 31;
    for (int head = split * SHARE + (thread >> 5); head < (split + 1) * SHARE; head += 12) {
      // The sink is the first part: a weight without a value.
      float most = arguments.sinks[first_head + head] * 1.4426950408889634f, weights = 1;
      float sum[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) sum[i] = 0;
      for (int other = 0; other < list.splits; ++other) {
        u32 theirs;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(base), "r"(other));
        float part_most, part_weights;
        asm volatile("ld.shared::cluster.f32 %0, [%1];"
                     : "=f"(part_most) : "r"(theirs + STATS_AT + head * 4));
        asm volatile("ld.shared::cluster.f32 %0, [%1];"
                     : "=f"(part_weights) : "r"(theirs + STATS_AT + (TILE + head) * 4));
        float top = fmaxf(most, part_most);
        float shrink = exp2_of(most - top), gain = exp2_of(part_most - top);
        weights = weights * shrink + part_weights * gain;
        most = top;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float4 part;
          asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                       : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w)
                       : "r"(theirs + (head * PART_ROW + k * 128 + lane * 4) * 4));
          sum[4 * k] = sum[4 * k] * shrink + part.x * gain;
          sum[4 * k + 1] = sum[4 * k + 1] * shrink + part.y * gain;
          sum[4 * k + 2] = sum[4 * k + 2] * shrink + part.z * gain;
          sum[4 * k + 3] = sum[4 * k + 3] * shrink + part.w * gain;
        }
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) sum[i] /= weights;
      if (lane >= 16) {
#pragma unroll
        for (int i = 12; i < 16; i += 2) {
          int angle = token * 32 + (lane - 16) * 2 + (i - 12) / 2;
          float cosine = arguments.cos[angle], sine = arguments.sin[angle];
          float even = sum[i] * cosine + sum[i + 1] * sine;
          sum[i + 1] = sum[i + 1] * cosine - sum[i] * sine;
          sum[i] = even;
        }
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint2 two = make_uint2(bfloat_pair(sum[4 * k], sum[4 * k + 1]),
                               bfloat_pair(sum[4 * k + 2], sum[4 * k + 3]));
        *(uint2 *)(out + head * DIM + k * 128 + lane * 4) = two;
      }
    }
    cluster_sync();
  }
}

// The verify kernel: all that follows the convolution, one launch a layer.
//
// One block takes one value head of one request. Rows of its window: P pending ones (a chain), then the n of the tree,
// together R, the joint rows; their keys k and values v are inputs, kept in a ring. With kappa = 1/|k|, rho = 1/|q|,
// c = log decays summed along the path (fp64, so that differences of large sums keep their digits) and w = kappa u:
//
//     (I + L) w = b (v - exp(c) kappa S k)        b = beta kappa,  L[i,j] = b_i kappa_i exp(c_i - c_j) k_i.k_j,  j above i
//     o = rho (exp(c) S q + sum_j exp(c_i - c_j) (q.k_j) w_j) / sqrt(dk)          j above i, or i
//     fold: S <- exp(c_P) S + sum over pending j of exp(c_P - c_j) w_j k_j^T
//
// What makes it fast
//   * Bytes. The state is read once, its 32 KiB (bf16) are asked for at once by asynchronous copies into shared memory,
//     and several blocks an SM keep a hundred KiB in flight. Nothing but outputs and gates is written: a pending row is
//     its inputs, 12 KiB a layer at 32 heads of 128, where an fp32 pseudo-value with its key would be 20 KiB, read every
//     round and written once more.
//   * The matrix unit. dv is M, rows of the window are N, in steps of 8, so a window of 4 rows is not padded to 16 or 64.
//     16-bit keys, queries and states are multiplied as they are: exact products, fp32 sums.
//   * The order. L depends on keys and gates alone, so the inverses of its diagonal blocks are ready when the state arrives.
//   * The solve is forward substitution by blocks of 8 on the matrix unit: TF32 with both operands split in two, error
//     2^-21. Accumulators of one product are, register by register, the operand of the next.
//
// Compiled with: DK, DV (64, 128, 256); KT, QT (tiles of 8 rows: joint, of queries); BF16 (else fp16); STATE32; NORM.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short u16;

struct Arguments {
    const u16* queries;   // [B, T, H, DK]
    const u16* keys;      // [R, ring, H, DK]
    const u16* values;    // [R, ring, HV, DV]
    float2* gates;        // [R, ring, HV] log decay, beta
    void* state;          // [slots, HV, DV, DK]
    const void* a;        // [B, T, HV]
    const void* b;
    const u16* z;         // [B, T, HV, DV], read if NORM
    const void* weight;   // [DV], read if NORM
    u16* out;             // [B, T, HV, DV]
    const int* end;       // [R]
    int* pending;         // [R, HV]
    const i64* slots;     // [B]
    const i64* requests;  // [B]
    const int* rows;      // [B]
    const u64* ancestors; // [B, T]
    const int* longest;   // [B]
    const float* neg_A;   // [HV]
    const float* dt_bias; // [HV]
    i64 slot_stride, a_stride, a_row, b_stride, b_row, z_stride, z_row;
    int T, ring, capacity, H, HV, gates32, weight32, fold_always;
    float beta_scale, eps, norm_eps;
};

constexpr int WARPS = DV > 128 ? DV / 32 : 4;
constexpr int THREADS = 32 * WARPS;
constexpr int MT = DV / (16 * WARPS);        // tiles of 16 dv rows of a warp
constexpr int KR = 8 * KT, QR = 8 * QT;      // rows, padded
constexpr int XT = KT + QT;
constexpr int MS = KR % 16 ? KR : KR + 8;    // row stride of the squares; 8 or 24 mod 32: no bank conflicts
constexpr int OS = DV + 4;                   // row stride of the outputs
constexpr int STATE_BYTES = STATE32 ? 4 : 2;

__host__ __device__ constexpr int later(int at, int bytes) { return at + (bytes + 15) / 16 * 16; }
__host__ __device__ constexpr int at_least(int x, int y) { return x > y ? x : y; }
__host__ __device__ constexpr int at_most(int x, int y) { return x < y ? x : y; }
// Keys, then queries, then values; outputs take the place of queries and values when these are used up.
constexpr int AT_X = 0;
constexpr int AT_OUT = KR * DK * 2;
constexpr int AT_V = later(AT_OUT, QR * DK * 2);
constexpr int AT_S = at_least(later(AT_V, KR * DV * 2), later(AT_OUT, QR * OS * 4));
constexpr int AT_Z = later(AT_S, DV * DK * STATE_BYTES);
constexpr int AT_M = later(AT_Z, NORM ? QR * DV * 2 : 0);
constexpr int AT_A = later(AT_M, KR * MS * 4);
constexpr int AT_C = later(AT_A, QR * MS * 4);
constexpr int AT_G = later(AT_C, KR * 8);
constexpr int AT_KEYROWS = later(AT_G, KR * 8);      // float4: kappa, beta, b, exp(c) kappa
constexpr int AT_QROWS = later(AT_KEYROWS, KR * 16); // float2: rho / sqrt(dk), exp(c) rho / sqrt(dk)
constexpr int AT_MASKS = later(AT_QROWS, QR * 8);
constexpr int SHARED = later(AT_MASKS, QR * 8);
extern "C" __constant__ const int shared_bytes = SHARED;

// Blocks that an SM is to hold: as many as fit its shared memory, with the registers that accumulators need.
constexpr int REGISTERS = at_most(255, 88 + 4 * MT * XT);
#ifndef BLOCKS
constexpr int BLOCKS = at_least(1, at_most(227 * 1024 / (SHARED + 1024), 65536 / (THREADS * REGISTERS)));
#endif

#define D __device__ __forceinline__

// ---- 16-bit numbers

#if BF16
#define KIND "bf16"
D float low(u32 pair) { return __uint_as_float(pair << 16); }
D float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
D u32 pack(float lo, float hi) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
}
#else
#define KIND "f16"
D float low(u32 pair) {
    float wide;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(wide) : "r"(pair));
    return wide;
}
D float high(u32 pair) {
    float wide;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(wide) : "r"(pair));
    return wide;
}
D u32 pack(float lo, float hi) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
}
#endif

D float element(const void* base, i64 at, int is32) {
    return is32 ? static_cast<const float*>(base)[at] : low(static_cast<const u16*>(base)[at]);
}

// ---- Shared memory and the matrix unit

D u32 address(const void* shared) { return static_cast<u32>(__cvta_generic_to_shared(shared)); }

D void copy16(u32 to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from)); }
D void close_group() { asm volatile("cp.async.commit_group;"); }
template <int N> D void wait_groups() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Place of the 16 bytes `chunk` of a row; rows of 16-bit numbers are permuted so that 8 rows meet 8 banks.
template <int COLUMNS> D u32 place16(int row, int chunk) { return row * (COLUMNS * 2) + ((chunk ^ (row & 7)) << 4); }
D u32 place32(int row, int chunk) { return row * (DK * 4) + ((chunk ^ ((row & 3) << 1)) << 4); }
D u32 place_state(int row, int chunk) { return STATE32 ? place32(row, chunk) : place16<DK>(row, chunk); }

D void load4(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
}
D void load_transposed(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
}

D void load_transposed(u32 (&r)[2], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(from));
}

// c += a b, 16 x 16 by 16 x 8, 16-bit.
D void product16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += a b, 16 x 8 by 8 x 8, TF32.
D void product32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// An fp32 number as two of TF32, which the matrix unit cuts to their upper 19 bits: x = big + small (1 + 2^-10).
D void split(float x, u32& big, u32& small) {
    big = __float_as_uint(x) & 0xffffe000u;
    small = __float_as_uint(x - __uint_as_float(big));
}

// A tile of accumulators, 16 dv rows by 8 rows, as the left operand of the next product. The matrix unit's k-th column
// is row 2k of the tile for k < 4 and row 2 (k - 4) + 1 above, on both sides of the product.
struct Left {
    u32 big[4], small[4];
    D explicit Left(const float (&c)[4]) {
        split(c[0], big[0], small[0]);
        split(c[2], big[1], small[1]);
        split(c[1], big[2], small[2]);
        split(c[3], big[3], small[3]);
    }
};

// c += left m^T, with m an 8 x 8 block of a square in shared memory.
D void product(float (&c)[4], const Left& left, const float* m, int g, int q) {
    const float2 pair = *reinterpret_cast<const float2*>(m + g * MS + 2 * q);
    u32 big0, small0, big1, small1;
    split(pair.x, big0, small0);
    split(pair.y, big1, small1);
    product32(c, left.small, big0, big1);
    product32(c, left.big, small0, small1);
    product32(c, left.big, big0, big1);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) verify(const __grid_constant__ Arguments p) {
    extern __shared__ __align__(128) char shared[];
    const u32 base = address(shared);
    float* M = reinterpret_cast<float*>(shared + AT_M);       // -L below the diagonal blocks, (I + L)^-1 in them
    float* A = reinterpret_cast<float*>(shared + AT_A);       // what queries take of w
    double* c = reinterpret_cast<double*>(shared + AT_C);
    double* log_decay = reinterpret_cast<double*>(shared + AT_G);
    float4* key_rows = reinterpret_cast<float4*>(shared + AT_KEYROWS);
    float2* query_rows = reinterpret_cast<float2*>(shared + AT_QROWS);
    u64* masks = reinterpret_cast<u64*>(shared + AT_MASKS);

    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, q = lane % 4;
    const int head = blockIdx.x, key_head = head / (p.HV / p.H);
    const i64 batch = blockIdx.y;
    const i64 slot = p.slots[batch], request = p.requests[batch];
    const int n = p.T ? p.rows[batch] : 0;
    const int longest = p.T ? p.longest[batch] : 0;
    u16* out = p.out + (batch * p.T * p.HV + head) * DV;
    const int out_row = p.HV * DV;
    if (slot < 0) {
        for (int at = tid; at < p.T * (DV / 8); at += THREADS)
            *reinterpret_cast<uint4*>(out + at / (DV / 8) * (i64)out_row + at % (DV / 8) * 8) = make_uint4(0, 0, 0, 0);
        return;
    }

    // 1. Ask for rows, then for the state.
    const int P = p.pending[request * p.HV + head];
    const int joint = P + n;
    const int first = p.end[request] - P;
    const auto place = [&](int i) {
        int at = first + i;
        at = at < 0 ? at + p.ring : at;
        at = at >= p.ring ? at - p.ring : at;
        return request * p.ring + at;
    };
    for (int at = tid; at < joint * (DK / 8); at += THREADS) {
        const int i = at / (DK / 8), chunk = at % (DK / 8);
        copy16(base + AT_X + place16<DK>(i, chunk), p.keys + (place(i) * p.H + key_head) * DK + chunk * 8);
    }
    for (int at = tid; at < n * (DK / 8); at += THREADS) {
        const int r = at / (DK / 8), chunk = at % (DK / 8);
        copy16(base + AT_X + place16<DK>(KR + r, chunk), p.queries + ((batch * p.T + r) * p.H + key_head) * DK + chunk * 8);
    }
    for (int at = tid; at < joint * (DV / 8); at += THREADS) {
        const int i = at / (DV / 8), chunk = at % (DV / 8);
        copy16(base + AT_V + place16<DV>(i, chunk), p.values + (place(i) * p.HV + head) * DV + chunk * 8);
    }
    if (NORM)
        for (int at = tid; at < n * (DV / 8); at += THREADS) {
            const int r = at / (DV / 8), chunk = at % (DV / 8);
            copy16(base + AT_Z + (r * DV + chunk * 8) * 2, p.z + batch * p.z_stride + r * p.z_row + head * DV + chunk * 8);
        }
    close_group();
    constexpr int WARP_ROWS = DV / WARPS;
    constexpr int CHUNKS = DK * STATE_BYTES / 16;
    char* const state = static_cast<char*>(p.state)
                        + (slot * p.slot_stride + (i64)head * DV * DK + warp * WARP_ROWS * DK) * STATE_BYTES;
#pragma unroll
    for (int step = 0; step < WARP_ROWS * CHUNKS / 32; ++step) {
        const int at = step * 32 + lane;
        copy16(base + AT_S + place_state(warp * WARP_ROWS + at / CHUNKS, at % CHUNKS), state + at * 16);
    }
    close_group();

    // 2. Gates, norms, sums of decays.
    for (int i = tid; i < joint; i += THREADS) {
        float2 gate;
        if (i < P) {
            gate = p.gates[place(i) * p.HV + head];
        } else {
            const int r = i - P;
            const float x = element(p.a, batch * p.a_stride + r * p.a_row + head, p.gates32) + p.dt_bias[head];
            const float y = element(p.b, batch * p.b_stride + r * p.b_row + head, p.gates32);
            gate.x = fmaxf(p.neg_A[head] * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)))), -1e4f);
            gate.y = p.beta_scale / (1.0f + expf(-y));
            p.gates[place(i) * p.HV + head] = gate;
            masks[r] = p.ancestors[batch * p.T + r];
        }
        log_decay[i] = gate.x;
        key_rows[i].y = gate.y;
    }
    wait_groups<1>();
    __syncthreads();
    for (int i = tid; i < joint; i += THREADS) {
        double sum = 0.0;
        for (int j = 0; j < min(i + 1, P); ++j) sum += log_decay[j];
        if (i >= P)
            for (u64 mask = masks[i - P]; mask; mask &= mask - 1) sum += log_decay[P + __ffsll(mask) - 1];
        c[i] = sum;
    }
    for (int at = tid; at < (joint + n + 3) / 4 * 32; at += THREADS) {
        const int i = at / 8, part = at % 8;
        const int row = i < joint ? i : KR + i - joint;
        float sum = 0.0f;
        if (i < joint + n)
#pragma unroll
            for (int chunk = part; chunk < DK / 8; chunk += 8) {
                const uint4 eight = *reinterpret_cast<const uint4*>(shared + AT_X + place16<DK>(row, chunk));
                for (u32 pair : {eight.x, eight.y, eight.z, eight.w})
                    sum += low(pair) * low(pair) + high(pair) * high(pair);
            }
        for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        const float scale = rsqrtf(sum + p.eps);
        if (part == 0 && i < joint) key_rows[i].x = scale;
        if (part == 0 && i >= joint && i < joint + n) query_rows[i - joint].x = scale * rsqrtf((float)DK);
    }
    __syncthreads();

    // 3. Products of the rows with each other.
    for (int i = tid; i < KR; i += THREADS) {
        float4 row = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < joint) {
            row = key_rows[i];
            row.z = row.x * row.y;
            row.w = row.x * expf((float)c[i]);
        }
        *reinterpret_cast<float2*>(&key_rows[i].z) = make_float2(row.z, row.w);
    }
    for (int r = tid; r < n; r += THREADS) query_rows[r].y = query_rows[r].x * expf((float)c[P + r]);
    const int key_tiles = (joint + 7) / 8;
    for (int unit = warp; unit < (XT + 1) / 2 * key_tiles; unit += WARPS) {
        const int x0 = unit / key_tiles * 16, j0 = unit % key_tiles * 8;
        const bool of_keys = x0 < min(joint, KR) && j0 <= x0 + 15;
        const bool of_queries = x0 + 15 >= KR && max(x0 - KR, 0) < n;
        if (!of_keys && !of_queries) continue;
        float sum[2][4] = {};
        const int a_row = min(x0 + lane % 16, 8 * XT - 1);
#pragma unroll
        for (int k = 0; k < DK / 32; ++k) {
            u32 right[4], left[4];
            load4(right, base + AT_X + place16<DK>(j0 + lane % 8, 4 * k + lane / 8));
            load4(left, base + AT_X + place16<DK>(a_row, 4 * k + lane / 16));
            product16(sum[0], left, right[0], right[1]);
            load4(left, base + AT_X + place16<DK>(a_row, 4 * k + 2 + lane / 16));
            product16(sum[1], left, right[2], right[3]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int x = x0 + g + 8 * (e / 2), j = j0 + 2 * q + e % 2;
            const float dot = sum[0][e] + sum[1][e];
            const int r = x < KR ? x - P : x - KR; // row of the tree, below 0 where pending
            const int i = x < KR ? x : P + r;
            float value = 0.0f;
            if (i < joint && r < n && (x < KR ? j < i : j <= i)
                && (j < P || (masks[max(r, 0)] >> max(j - P, 0) & 1))) {
                const float ratio = expf((float)(c[i] - c[j]));
                value = dot * ratio * (x < KR ? -key_rows[i].y * key_rows[i].x * key_rows[i].x : query_rows[r].x);
            }
            if (x < KR) M[x * MS + j] = value;
            else if (r < QR) A[r * MS + j] = value;
        }
    }
    __syncthreads();

    // 4. Inverses of the diagonal blocks, column by column.
    if (const int block = tid / 8, column = tid % 8; warp * 4 < key_tiles) {
        float* const square = M + min(block, KT - 1) * (8 * MS + 8);
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] = i == column;
#pragma unroll
            for (int j = 0; j < i; ++j) x[i] += square[i * MS + j] * x[j];
        }
        __syncwarp();
        if (block < key_tiles)
#pragma unroll
            for (int i = 0; i < 8; ++i) square[i * MS + column] = x[i];
    }

    // 5. Products of the state with the rows: 16 dv rows by 8 rows a tile; keys first, then queries.
    wait_groups<0>();
    __syncwarp();
    float tile[MT][XT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int x = 0; x < XT; ++x)
#pragma unroll
            for (int e = 0; e < 4; ++e) tile[m][x][e] = 0.0f;
    const auto in_use = [&](int x) { return x < KT ? 8 * x < joint : 8 * (x - KT) < n; };
    const int v0 = warp * WARP_ROWS;
#pragma unroll 1
    for (int k = 0; k < DK / 32; ++k) {
#if STATE32
        u32 big[MT][4][4], small[MT][4][4];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int step = 0; step < 4; ++step)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float2 pair = *reinterpret_cast<const float2*>(
                        shared + AT_S + place32(v0 + 16 * m + g + 8 * half, 8 * k + 2 * step + q / 2) + q % 2 * 8);
                    split(pair.x, big[m][step][half], small[m][step][half]);
                    split(pair.y, big[m][step][half + 2], small[m][step][half + 2]);
                }
#else
        u32 left[MT][2][4];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int step = 0; step < 2; ++step)
                load4(left[m][step], base + AT_S + place16<DK>(v0 + 16 * m + lane % 16, 4 * k + 2 * step + lane / 16));
#endif
#pragma unroll
        for (int x = 0; x < XT; ++x) {
            if (!in_use(x)) continue;
            u32 right[4];
            load4(right, base + AT_X + place16<DK>(8 * x + lane % 8, 4 * k + lane / 8));
#pragma unroll
            for (int m = 0; m < MT; ++m) {
#if STATE32
#pragma unroll
                for (int step = 0; step < 4; ++step) {
                    const u32 r0 = __float_as_uint(low(right[step])), r1 = __float_as_uint(high(right[step]));
                    product32(tile[m][x], small[m][step], r0, r1);
                    product32(tile[m][x], big[m][step], r0, r1);
                }
#else
                product16(tile[m][x], left[m][0], right[0], right[1]);
                product16(tile[m][x], left[m][1], right[2], right[3]);
#endif
            }
        }
    }

    // 6. Right sides, then forward substitution by blocks.
#pragma unroll
    for (int x = 0; x < KT; ++x) {
        if (!in_use(x)) continue;
        u32 v[2 * MT];
        const u32 from = base + AT_V + place16<DV>(8 * x + lane % 8, v0 / 8 + lane / 8 % (2 * MT));
        load_transposed(v, from);
        const float4 even = key_rows[8 * x + 2 * q], odd = key_rows[8 * x + 2 * q + 1];
        const bool has_even = 8 * x + 2 * q < joint, has_odd = 8 * x + 2 * q + 1 < joint;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float* const e = tile[m][x] + 2 * half;
                e[0] = has_even ? even.z * (low(v[2 * m + half]) - even.w * e[0]) : 0.0f;
                e[1] = has_odd ? odd.z * (high(v[2 * m + half]) - odd.w * e[1]) : 0.0f;
            }
    }
    __syncthreads(); // inverses are there; queries and values are used up
#pragma unroll
    for (int x = KT; x < XT; ++x) {
        const int r = 8 * (x - KT) + 2 * q;
        const float even = r < n ? query_rows[r].y : 0.0f, odd = r + 1 < n ? query_rows[r + 1].y : 0.0f;
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            tile[m][x][0] *= even, tile[m][x][1] *= odd, tile[m][x][2] *= even, tile[m][x][3] *= odd;
        }
    }
#pragma unroll
    for (int x = 0; x < KT; ++x) {
        if (!in_use(x)) continue;
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            float w[4] = {};
            product(w, Left(tile[m][x]), M + 8 * x * (MS + 1), g, q);
#pragma unroll
            for (int e = 0; e < 4; ++e) tile[m][x][e] = w[e];
            const Left solved(w);
#pragma unroll
            for (int y = x + 1; y < KT; ++y)
                if (in_use(y)) product(tile[m][y], solved, M + 8 * y * MS + 8 * x, g, q);
#pragma unroll
            for (int y = KT; y < XT; ++y)
                if (in_use(y)) product(tile[m][y], solved, A + 8 * (y - KT) * MS + 8 * x, g, q);
        }
    }

    // 7. Outputs, turned over in shared memory; a warp normalises and writes whole rows.
    float* const turned = reinterpret_cast<float*>(shared + AT_OUT);
#pragma unroll
    for (int x = KT; x < XT; ++x)
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int r = 8 * (x - KT) + 2 * q + e % 2;
                if (r < n) turned[r * OS + v0 + 16 * m + g + 8 * (e / 2)] = tile[m][x][e];
            }
    __syncthreads();
    for (int r = warp; r < p.T; r += WARPS) {
        constexpr int EACH = DV / 32;
        float o[EACH];
        float squares = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            o[e] = r < n ? turned[r * OS + lane * EACH + e] : 0.0f;
            squares += o[e] * o[e];
        }
        if (NORM && r < n) {
            for (int step = 1; step < 32; step *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
            const float scale = rsqrtf(squares / DV + p.norm_eps);
#pragma unroll
            for (int e = 0; e < EACH; e += 2) {
                const u32 gates = *reinterpret_cast<const u32*>(shared + AT_Z + (r * DV + lane * EACH + e) * 2);
                const float z0 = low(gates), z1 = high(gates);
                o[e] *= scale * element(p.weight, lane * EACH + e, p.weight32) * z0 / (1.0f + expf(-z0));
                o[e + 1] *= scale * element(p.weight, lane * EACH + e + 1, p.weight32) * z1 / (1.0f + expf(-z1));
            }
        }
        u32* const to = reinterpret_cast<u32*>(out + r * (i64)out_row + lane * EACH);
        if constexpr (EACH == 2) *to = pack(o[0], o[1]);
        else if constexpr (EACH == 4) *reinterpret_cast<uint2*>(to) = make_uint2(pack(o[0], o[1]), pack(o[2], o[3]));
        else *reinterpret_cast<uint4*>(to) = make_uint4(pack(o[0], o[1]), pack(o[2], o[3]), pack(o[4], o[5]), pack(o[6], o[7]));
    }

    // 8. Fold.
    if (P == 0 || !(p.fold_always || P + longest > p.capacity)) return;
    const double last = c[P - 1];
    const float decay = expf((float)last);
#pragma unroll
    for (int x = 0; x < KT; ++x) {
        const int j = 8 * x + 2 * q;
        const float even = j < P ? expf((float)(last - c[j])) : 0.0f;
        const float odd = j + 1 < P ? expf((float)(last - c[j + 1])) : 0.0f;
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            tile[m][x][0] *= even, tile[m][x][1] *= odd, tile[m][x][2] *= even, tile[m][x][3] *= odd;
        }
    }
#pragma unroll 1
    for (int k = 0; k < DK / 32; ++k) {
        float sum[MT][4][4]; // four tiles of 8 columns
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int part = 0; part < 4; ++part)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int v = v0 + 16 * m + g + 8 * half;
#if STATE32
                    const float2 pair = *reinterpret_cast<const float2*>(
                        shared + AT_S + place32(v, 8 * k + 2 * part + q / 2) + q % 2 * 8);
                    sum[m][part][2 * half] = decay * pair.x, sum[m][part][2 * half + 1] = decay * pair.y;
#else
                    const u32 pair = *reinterpret_cast<const u32*>(shared + AT_S + place16<DK>(v, 4 * k + part) + 4 * q);
                    sum[m][part][2 * half] = decay * low(pair), sum[m][part][2 * half + 1] = decay * high(pair);
#endif
                }
#pragma unroll
        for (int x = 0; x < KT; ++x) {
            if (8 * x >= P) continue;
            u32 right[4];
            load_transposed(right, base + AT_X + place16<DK>(8 * x + lane % 8, 4 * k + lane / 8));
            const bool has_even = 8 * x + 2 * q < P, has_odd = 8 * x + 2 * q + 1 < P;
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const Left w(tile[m][x]);
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const u32 r0 = has_even ? __float_as_uint(low(right[part])) : 0;
                    const u32 r1 = has_odd ? __float_as_uint(high(right[part])) : 0;
                    product32(sum[m][part], w.small, r0, r1);
                    product32(sum[m][part], w.big, r0, r1);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int part = 0; part < 4; ++part)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int v = v0 + 16 * m + g + 8 * half;
#if STATE32
                    *reinterpret_cast<float2*>(shared + AT_S + place32(v, 8 * k + 2 * part + q / 2) + q % 2 * 8)
                        = make_float2(sum[m][part][2 * half], sum[m][part][2 * half + 1]);
#else
                    *reinterpret_cast<u32*>(shared + AT_S + place16<DK>(v, 4 * k + part) + 4 * q)
                        = pack(sum[m][part][2 * half], sum[m][part][2 * half + 1]);
#endif
                }
    }
    __syncwarp();
#pragma unroll
    for (int step = 0; step < WARP_ROWS * CHUNKS / 32; ++step) {
        const int at = step * 32 + lane;
        *reinterpret_cast<uint4*>(state + at * 16) =
            *reinterpret_cast<const uint4*>(shared + AT_S + place_state(v0 + at / CHUNKS, at % CHUNKS));
    }
    if (tid == 0) p.pending[request * p.HV + head] = 0;
}

// What the kernel asks of the machine, a function an instruction: copies, the matrix unit, 16-bit numbers.
//
// Compiled with BF16 (else fp16), the kind of 16-bit inputs. tests/ops/emulation has the same functions for a CPU.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short u16;

struct alignas(64) TensorMap {
    u64 opaque[16];
};

#define D __device__ __forceinline__

// ---- 16-bit numbers

D u32 pack_bf16(float lo, float hi) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
}
#if BF16
#define KIND "bf16"
D float low(u32 pair) { return __uint_as_float(pair << 16); }
D float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
D u32 pack(float lo, float hi) { return pack_bf16(lo, hi); }
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

template <int IS32> D float element(const void* base, i64 at) {
    return IS32 ? static_cast<const float*>(base)[at] : low(static_cast<const u16*>(base)[at]);
}

D float power2(float x) { // to 22 bits; 0 below 2^-126
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

D float silu(float x) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power2(x * -1.44269504f)));
    return x * inverse;
}

// An address or an integer that is computed here, once: the compiler likes to compute it again wherever it is used.
template <class Number> D Number once(Number x) {
    if constexpr (sizeof(x) == 8) asm volatile("" : "+l"(x));
    else asm volatile("" : "+r"(x));
    return x;
}

// Asked for here, and not where it is used.
D int load_now(const int* from) {
    int value;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// ---- Shared memory and the matrix unit

D u32 address(const void* shared) { return static_cast<u32>(__cvta_generic_to_shared(shared)); }

template <int BYTES> D void copy(u32 to, const void* from) {
    if constexpr (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
D void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
D void store8(void* to, uint2 what) { // to an address of `once`, of which the compiler knows neither memory nor alignment
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(what.x), "r"(what.y) : "memory");
}
D void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
D void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
D void wait_for_first_group() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

// A barrier that counts the bytes of a state.
D void open(u32 barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n fence.mbarrier_init.release.cluster;" ::"r"(barrier) : "memory");
}
D void wait(u32 barrier) {
    asm volatile("{.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
                 "@!done bra again;}" ::"r"(barrier) : "memory");
}
// Matrices of TALL rows of WIDE elements that the tensor copy engine reads and writes, in slices of 128 bytes a row. It
// permutes a row's pieces of 16 bytes, so that eight rows of a piece lie in different banks.
template <int TALL, int WIDE, int BYTES> struct Tile {
    static constexpr int SLICES = WIDE * BYTES / 128, EACH = 128 / BYTES;

    D static int at(int row, int chunk) { // of the 16 bytes `chunk` of a row
        return chunk / 8 * (TALL * 128) + row * 128 + ((chunk % 8 ^ row & 7) << 4);
    }
    D static void read(u32 to, const TensorMap& map, int index, int slot, u32 barrier) {
        asm volatile("{.reg .b64 token; mbarrier.arrive.expect_tx.shared::cta.b64 token, [%0], %1;}"
                     ::"r"(barrier), "n"(TALL * WIDE * BYTES) : "memory");
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice)
            asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                         "[%0], [%1, {%2, %3, %4}], [%5];"
                         ::"r"(to + slice * (TALL * 128)), "l"(&map), "r"(slice * EACH), "r"(index * TALL), "r"(slot),
                         "r"(barrier) : "memory");
    }
    D static void write(const TensorMap& map, int index, int slot, u32 from) {
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice)
            asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];"
                         ::"l"(&map), "r"(slice * EACH), "r"(index * TALL), "r"(slot), "r"(from + slice * (TALL * 128))
                         : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
    D static void written() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); } // no more read from here
};
// A launch may begin while the one before it ends (programmatic dependent launch); not before the one before that has ended,
// or blocks of three launches meet and crowd some SMs while others have none.
D void after_launch_before() { asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory"); }
D void before_copy_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

D void load4(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
}
D void store4(u32 to, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
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
    asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of bf16, whatever the inputs are: 16 or 8 columns of a.
D void product_halves(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
D void product_halves(float (&c)[4], const u32 (&a)[4], u32 b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
}

// c += a b, 16 x 8 by 8 x 8, TF32.
D void product32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

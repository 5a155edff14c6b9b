// The machine of src/treewy/ops/cuda/hardware.cuh on a CPU: one block at a time, every thread of it a coroutine.
//
// It is there to find mistakes, so it is as unkind as the real machine may be. Between two points where threads wait for
// each other, one thread runs after another in random order. Copies arrive when they are waited for, not before; a tile
// of the copy engine comes at once or at the last moment, and leaves at the last. Shared memory begins as NaN. Threads of
// a warp that do not all come to the same instruction of the warp, a barrier that not all reach, a copy that is not waited
// for, and a write past the end of shared memory stop the launch with a message.

#pragma once

#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <ucontext.h>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short u16;

#define D inline
#define __global__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n)
#define __shared__

struct int2 { int x, y; };
struct uint2 { u32 x, y; };
struct float2 { float x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline int min(int x, int y) { return x < y ? x : y; }
inline int max(int x, int y) { return x > y ? x : y; }
inline u32 __float_as_uint(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
inline float __uint_as_float(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
inline float rsqrtf(float x) { return std::nextafter(1.0f / sqrtf(x), INFINITY); } // the real one is as far off, or further
// The real one is off by up to two units of its last place, here by -2 to 2, and gives 0 below 2^-126.
inline float power2(float x) {
    const u32 off = (__float_as_uint(x) * 2654435761u >> 24) % 5 - 2;
    return x == 0.0f || x != x || x > 126.0f ? exp2f(x) : x < -126.0f ? 0.0f : __uint_as_float(__float_as_uint(exp2f(x)) + off);
}
inline float silu(float x) { return x / (1.0f + expf(-x)); }

struct TensorMap {
    u64 address, slots, heads, dv, dk, slot_bytes;
};

// ---- The machine

constexpr int MEMORY = 232448, GUARD = 4096;
alignas(1024) char shared[MEMORY + GUARD];

namespace machine {

constexpr int LANES = 32, STACK = 1 << 18;
enum State { READY, IN_WARP, AT_BARRIER, DONE };
using Operation = void (*)(void* (&lanes)[LANES]);

struct Copy { u32 to; const void* from; int bytes, group; };

struct Thread {
    std::unique_ptr<char[]> stack{new char[STACK]};
    ucontext_t begin;
    jmp_buf at;
    bool begun;
    State state;
    Operation operation; // what it waits for with its warp, and its part of it
    void* part;
    std::vector<Copy> copies;
    int groups; // closed
    bool fenced; // what it wrote is there for the copy engine
};

struct Index { unsigned x, y, z; };

inline std::vector<Thread> threads;
inline int running;
inline jmp_buf scheduler;
inline Index thread, block, grid;
inline std::string mistake;
inline u64 seed;
inline bool opened, asked, arrived;
inline int limit; // bytes of shared memory that the launch has
inline std::vector<Copy> tile;
inline std::vector<std::pair<char*, int>> leaving; // to memory from shared memory, 16 bytes each

inline u32 random(u32 below) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return (u32)(seed >> 20) % below;
}

inline Thread& self() { return threads[running]; }

inline void give_way(State state) {
    self().state = state;
    if (!_setjmp(self().at)) _longjmp(scheduler, 1);
}

inline void stop(const std::string& what) {
    if (mistake.empty()) mistake = what + " (thread " + std::to_string(running) + ")";
    give_way(DONE);
}

inline void with_warp(Operation operation, void* part) {
    self().operation = operation, self().part = part;
    give_way(IN_WARP);
}

// Carries out what a warp waits for; false where not all of its threads have come to it.
inline bool release(int warp) {
    Thread* const first = &threads[warp * LANES];
    void* parts[LANES];
    for (int lane = 0; lane < LANES; ++lane) {
        if (first[lane].state != IN_WARP || first[lane].operation != first->operation) return false;
        parts[lane] = first[lane].part;
    }
    first->operation(parts);
    for (int lane = 0; lane < LANES; ++lane) first[lane].state = READY;
    return true;
}

// A thread of this warp that may run, or -1.
inline int ready_thread(int warp) {
    const int from = random(LANES);
    for (int i = 0; i < LANES; ++i) {
        const int number = warp * LANES + (from + i) % LANES;
        if (threads[number].state == READY) return number;
    }
    return -1;
}

// The next thread to run, or -1. One warp runs ahead of the others, as far as it comes; now and then another.
inline int choose(int& ahead) {
    const int warps = threads.size() / LANES;
    if (random(64) == 0) ahead = random(warps);
    for (int turn = 0; turn < 2; ++turn) {
        for (int i = 0; i < warps; ++i) {
            const int warp = (ahead + i) % warps;
            int number = ready_thread(warp);
            if (number < 0 && release(warp)) number = ready_thread(warp);
            if (number < 0) continue;
            ahead = warp;
            return number;
        }
        for (auto& one : threads)
            if (one.state == IN_WARP) return -1;
        for (auto& one : threads)
            if (one.state == AT_BARRIER) one.state = READY;
        ahead = random(warps);
    }
    return -1;
}

template <class Kernel> void run_block(const Kernel& kernel, int count) {
    memset(shared, 0xff, sizeof shared);
    opened = asked = arrived = false;
    tile.clear(), leaving.clear();
    static const Kernel* entry;
    entry = &kernel;
    if ((int)threads.size() != count) threads = std::vector<Thread>(count);
    for (auto& one : threads) one.begun = false, one.state = READY, one.copies.clear(), one.groups = 0, one.fenced = false;
    static int ahead;
    ahead = 0;
    while (mistake.empty()) {
        running = choose(ahead);
        if (running < 0) break;
        thread = {(unsigned)running, 0, 0};
        Thread& one = threads[running];
        if (_setjmp(scheduler)) continue;
        if (one.begun) _longjmp(one.at, 1);
        one.begun = true;
        getcontext(&one.begin);
        one.begin.uc_stack.ss_sp = one.stack.get(), one.begin.uc_stack.ss_size = STACK, one.begin.uc_link = nullptr;
        makecontext(&one.begin, (void (*)())(+[] {
            (*entry)();
            if (!self().copies.empty()) stop("a copy that nothing waited for");
            give_way(DONE);
        }), 0);
        setcontext(&one.begin);
    }
    for (auto& one : threads)
        if (one.state != DONE && mistake.empty()) mistake = "threads of a warp wait for each other at different places";
    if (!leaving.empty() && mistake.empty()) mistake = "a block that ends before its tile was read";
    for (int at = limit; at < MEMORY + GUARD && mistake.empty(); ++at)
        if ((unsigned char)shared[at] != 0xff) mistake = "a write past the end of shared memory";
}

} // namespace machine

#define threadIdx machine::thread
#define blockIdx machine::block
#define gridDim machine::grid

// ---- What waits for others

inline void __syncthreads() { machine::give_way(machine::AT_BARRIER); }
inline void __syncwarp() {
    machine::with_warp([](void* (&)[32]) {}, nullptr);
}

// Every lane gets what another one gives.
template <class Number> Number from_lane(Number mine, int lane) {
    struct Part { Number give, take; int from; } part = {mine, mine, lane};
    machine::with_warp(
        [](void* (&lanes)[32]) {
            for (void* lane : lanes) {
                auto& one = *static_cast<Part*>(lane);
                one.take = static_cast<Part*>(lanes[one.from])->give;
            }
        },
        &part);
    return part.take;
}
template <class Number> Number __shfl_sync(u32, Number mine, int lane) { return from_lane(mine, lane); }
template <class Number> Number __shfl_xor_sync(u32, Number mine, int mask) {
    return from_lane(mine, machine::thread.x % 32 ^ mask);
}

inline bool __any_sync(u32, bool mine) {
    bool part = mine;
    machine::with_warp(
        [](void* (&lanes)[32]) {
            bool any = false;
            for (void* lane : lanes) any |= *static_cast<bool*>(lane);
            for (void* lane : lanes) *static_cast<bool*>(lane) = any;
        },
        &part);
    return part;
}

// ---- 16-bit numbers

inline u16 narrow_bf16(float x) {
    const u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40;
    return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
inline u32 pack_bf16(float lo, float hi) { return narrow_bf16(lo) | (u32)narrow_bf16(hi) << 16; }
inline float wide_bf16(u16 half) { return __uint_as_float((u32)half << 16); }
inline float wide_input(u16 half) {
#if BF16
    return wide_bf16(half);
#else
    _Float16 x;
    memcpy(&x, &half, 2);
    return x;
#endif
}
inline float low(u32 pair) { return wide_input(pair); }
inline float high(u32 pair) { return wide_input(pair >> 16); }
inline u32 pack(float lo, float hi) {
#if BF16
    return pack_bf16(lo, hi);
#else
    const _Float16 two[2] = {(_Float16)lo, (_Float16)hi};
    u32 pair;
    memcpy(&pair, two, 4);
    return pair;
#endif
}
template <int IS32> float element(const void* base, i64 at) {
    return IS32 ? static_cast<const float*>(base)[at] : low(static_cast<const u16*>(base)[at]);
}

// ---- Copies

inline u32 address(const void* at) { return static_cast<const char*>(at) - shared; }

template <int BYTES> void copy(u32 to, const void* from) {
    if (to % BYTES || reinterpret_cast<uintptr_t>(from) % BYTES) machine::stop("a copy that is not aligned");
    machine::self().copies.push_back({to, from, BYTES, machine::self().groups});
}
inline void wait_for(int groups) {
    auto& copies = machine::self().copies;
    std::vector<machine::Copy> later;
    for (const auto& one : copies)
        if (one.group < groups) memcpy(shared + one.to, one.from, one.bytes);
        else later.push_back(one);
    copies = later;
}
inline void close_group() { ++machine::self().groups; }
inline void wait_for_copies() { close_group(), wait_for(machine::self().groups); }
inline void wait_for_first_group() { wait_for(machine::self().groups - 1); }
inline void prefetch(const void*) {}
template <class Number> Number once(Number x) { return x; }
inline int load_now(const int* from) { return *from; }
inline void store8(void* to, uint2 what) { memcpy(to, &what, 8); }

inline void arrive() {
    for (const auto& one : machine::tile) memcpy(shared + one.to, one.from, one.bytes);
    machine::arrived = true;
}
inline void open(u32) { machine::opened = true; }
inline void wait(u32) {
    if (!machine::opened || !machine::asked) machine::stop("a wait for a tile that was not asked for");
    if (!machine::arrived) arrive();
}

inline void before_copy_engine() { machine::self().fenced = true; }

template <int TALL, int WIDE, int BYTES> struct Tile {
    static int at(int row, int chunk) { return chunk / 8 * (TALL * 128) + row * 128 + (((chunk % 8) ^ (row & 7)) << 4); }
    static char* of(const TensorMap& map, int index, int slot, int row, int chunk) {
        if (slot < 0 || slot >= (i64)map.slots || index >= (int)map.heads) machine::stop("a tile outside the pool");
        return reinterpret_cast<char*>(map.address) + slot * map.slot_bytes + ((i64)index * TALL + row) * WIDE * BYTES + chunk * 16;
    }
    static void read(u32 to, const TensorMap& map, int index, int slot, u32) {
        if (!machine::opened || to % 1024) machine::stop("a tile without a barrier, or not aligned");
        for (int row = 0; row < TALL; ++row)
            for (int chunk = 0; chunk < WIDE * BYTES / 16; ++chunk)
                machine::tile.push_back({to + at(row, chunk), of(map, index, slot, row, chunk), 16, 0});
        machine::asked = true;
        if (machine::random(2)) arrive();
    }
    static void write(const TensorMap& map, int index, int slot, u32 from) {
        for (const auto& one : machine::threads)
            if (!one.fenced) machine::stop("a tile that not all threads have given to the copy engine");
        for (int row = 0; row < TALL; ++row)
            for (int chunk = 0; chunk < WIDE * BYTES / 16; ++chunk)
                machine::leaving.push_back({of(map, index, slot, row, chunk), from + at(row, chunk)});
    }
    static void written() {
        for (const auto& [to, from] : machine::leaving) memcpy(to, shared + from, 16);
        machine::leaving.clear();
    }
};
inline void after_launch_before() {}

// ---- The matrix unit

struct Load { u32* to; int matrices; bool transposed; u32 from; };

inline void load(Load part) {
    machine::with_warp(
        [](void* (&lanes)[32]) {
            const auto part_of = [&](int lane) -> const Load& { return *static_cast<Load*>(lanes[lane]); };
            for (int lane = 0; lane < 32; ++lane)
                for (int i = 0; i < part_of(lane).matrices; ++i) {
                    u16 two[2];
                    for (int e = 0; e < 2; ++e) {
                        const int along = lane % 4 * 2 + e, across = lane / 4;
                        const bool transposed = part_of(lane).transposed;
                        const u32 row = part_of(8 * i + (transposed ? along : across)).from;
                        if (row % 16 || row + 16 > machine::limit) { machine::mistake = "a matrix row that is not aligned, or past the end of shared memory"; return; }
                        memcpy(two + e, shared + row + 2 * (transposed ? across : along), 2);
                    }
                    memcpy(part_of(lane).to + i, two, 4);
                }
        },
        &part);
}
inline void load4(u32 (&r)[4], u32 from) { load({r, 4, false, from}); }
inline void load_transposed(u32 (&r)[4], u32 from) { load({r, 4, true, from}); }
inline void store4(u32 to, u32 r0, u32 r1, u32 r2, u32 r3) {
    struct Store { u32 to, r[4]; } part = {to, {r0, r1, r2, r3}};
    machine::with_warp(
        [](void* (&lanes)[32]) {
            for (int lane = 0; lane < 32; ++lane)
                for (int i = 0; i < 4; ++i) {
                    const u32 row = static_cast<Store*>(lanes[8 * i + lane / 4])->to;
                    if (row % 16 || row + 16 > machine::limit) { machine::mistake = "a matrix row that is not aligned, or past the end of shared memory"; return; }
                    memcpy(shared + row + lane % 4 * 4, static_cast<Store*>(lanes[lane])->r + i, 4);
                }
        },
        &part);
}
inline void load_transposed(u32 (&r)[2], u32 from) { load({r, 2, true, from}); }

// A sum as the matrix unit makes it: nothing is rounded, terms are cut a little below the last bit of the largest one, and the
// sum to fp32 (Fasi et al., Numerical behavior of NVIDIA tensor cores, 2021; Hopper is taken to have two more bits).
template <int COUNT> float cut_sum(const double (&terms)[COUNT]) {
    double largest = 0.0, sum = 0.0;
    for (double term : terms) largest = std::fmax(largest, std::fabs(term));
    if (!std::isfinite(largest) || largest == 0.0) {
        for (double term : terms) sum += term;
        return sum;
    }
    const double unit = std::ldexp(1.0, std::ilogb(largest) - 23 - 2);
    for (double term : terms) sum += std::trunc(term / unit) * unit;
    const float nearest = sum;
    return std::fabs((double)nearest) > std::fabs(sum) ? std::nextafter(nearest, 0.0f) : nearest;
}

// c += a b with 16 x WIDE by WIDE x 8; a register holds PER numbers of a row.
template <int WIDE, int PER, class Number> void product(float (&c)[4], const u32* a, const u32* b, const Number& number) {
    struct Part { float* c; const u32 *a, *b; const Number* number; } part = {c, a, b, &number};
    machine::with_warp(
        [](void* (&lanes)[32]) {
            constexpr int STEP = 4 * PER; // columns of a that its registers 0 and 1 hold
            const auto part_of = [&](int lane) -> const Part& { return *static_cast<Part*>(lanes[lane]); };
            const Number& number = *part_of(0).number;
            float A[16][WIDE], B[WIDE][8];
            for (int lane = 0; lane < 32; ++lane)
                for (int k = 0; k < WIDE / 4; ++k) {
                    const int column = k / PER * STEP + lane % 4 * PER + k % PER;
                    for (int half = 0; half < 2; ++half)
                        A[lane / 4 + 8 * half][column] = number(part_of(lane).a[k / PER * 2 + half], k % PER);
                    B[column][lane / 4] = number(part_of(lane).b[k / PER], k % PER);
                }
            for (int lane = 0; lane < 32; ++lane)
                for (int e = 0; e < 4; ++e) {
                    const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
                    double terms[WIDE + 1] = {part_of(lane).c[e]};
                    for (int k = 0; k < WIDE; ++k) terms[k + 1] = (double)A[row][k] * B[k][column];
                    part_of(lane).c[e] = cut_sum(terms);
                }
        },
        &part);
}
inline void product16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 b[2] = {b0, b1};
    product<16, 2>(c, a, b, [](u32 pair, int e) { return wide_input(e ? pair >> 16 : pair); });
}
inline void product_halves(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 b[2] = {b0, b1};
    product<16, 2>(c, a, b, [](u32 pair, int e) { return wide_bf16(e ? pair >> 16 : pair); });
}
inline void product_halves(float (&c)[4], const u32 (&a)[4], u32 b0) {
    product<8, 2>(c, a, &b0, [](u32 pair, int e) { return wide_bf16(e ? pair >> 16 : pair); });
}
inline void product32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 b[2] = {b0, b1};
    product<8, 1>(c, a, b, [](u32 bits, int) { return __uint_as_float(bits & 0xffffe000u); });
}

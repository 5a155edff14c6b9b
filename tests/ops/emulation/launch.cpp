// verify.cu on the machine of hardware.cuh: a launch, block after block in random order.

#include <hardware.cuh>
#include <algorithm>
#include <numeric>

#include "verify.cu"

extern "C" int launch(const Arguments* arguments, const TensorMap* map, int x, int y, u64 seed, char* what, int room) {
    machine::seed = seed * 0x9e3779b97f4a7c15ull | 1;
    machine::mistake.clear();
    machine::limit = SHARED;
    machine::grid = {(unsigned)x, (unsigned)y};
    std::vector<int> blocks(x * y);
    std::iota(blocks.begin(), blocks.end(), 0);
    for (int left = x * y; left > 1; --left) std::swap(blocks[left - 1], blocks[machine::random(left)]);
    for (int block : blocks) {
        machine::block = {(unsigned)(block % x), (unsigned)(block / x)};
        machine::run_block([&] { verify(*arguments, *map); }, THREADS);
        if (machine::mistake.empty()) continue;
        snprintf(what, room, "block %d, %d: %s", block % x, block / x, machine::mistake.c_str());
        return 1;
    }
    return 0;
}

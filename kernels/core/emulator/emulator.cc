// SPDX-License-Identifier: Apache-2.0
#include "kernels/core/emulator/emulator.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <boost/context/fiber.hpp>
#include <boost/context/fixedsize_stack.hpp>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "services/base/check.h"

namespace isthmus::kernels::emulator {
namespace {

namespace context = boost::context;

constexpr int kWarp = 32;
constexpr int kNumBarriers = 16;
constexpr unsigned kMaxThreads = 1024;
constexpr size_t kMaxSharedBytes = 101376;  // sm_120, the smaller of our architectures.
constexpr size_t kMaxExchangeBytes = 64;
constexpr size_t kStackBytes = size_t{128} << 10;
constexpr int kPoison = 0xff;  // A NaN in every format.
// A kernel that spins so long without anybody else getting on is stuck.
constexpr auto kStuckAfter = std::chrono::seconds(30);

enum class LaneState : uint8_t { kReady, kSpins, kAtBarrier, kInExchange, kLeft };

struct PendingCopy {
  void* shared;
  const void* global;
  size_t bytes;
  size_t valid_bytes;
};

struct Lane {
  context::fiber fiber;
  LaneState state = LaneState::kReady;
  int barrier = 0;
  uint32_t mask = 0;
  Dim3 index;
  std::deque<std::vector<PendingCopy>> groups;  // Committed, oldest first.
  std::vector<PendingCopy> open_group;
};

// One collective of one mask that is being gathered. Two buffers: a lane can be one collective
// ahead of a lane that has not read yet, never two.
struct Gathering {
  uint32_t mask = 0;
  uint32_t arrived = 0;
  std::array<uint32_t, kWarp> turn = {};  // Collectives a lane has taken part in.
  std::array<std::array<std::byte, kWarp * kMaxExchangeBytes>, 2> slots;
};

struct Warp {
  std::vector<std::unique_ptr<Gathering>> gatherings;  // One per mask that was used.
};

struct PendingBulk {
  void* shared;
  const void* global;
  uint32_t bytes;
  uint64_t* barrier;
};

struct Block {
  GridLaunch launch;
  Dim3 index;
  absl::FunctionRef<void()>* body = nullptr;
  std::vector<Lane> lanes;
  std::vector<Warp> warps;
  std::array<int, kNumBarriers> arrived = {};
  std::array<int, kNumBarriers> expected = {};
  int num_left = 0;
  bool is_over = false;
  std::vector<PendingBulk> bulk;
  std::vector<std::byte> storage;
  std::byte* shared = nullptr;
  int running = 0;
  context::fiber scheduler;
};

thread_local Block* block = nullptr;
thread_local int reverse_depth = 0;

Lane& Running() { return block->lanes[static_cast<size_t>(block->running)]; }

void SwitchAway() { block->scheduler = std::move(block->scheduler).resume(); }

void Wait(LaneState state) {
  Running().state = state;
  SwitchAway();
}

void ReleaseBarrier(int id) {
  block->arrived[static_cast<size_t>(id)] = 0;
  for (Lane& lane : block->lanes) {
    if (lane.state == LaneState::kAtBarrier && lane.barrier == id) lane.state = LaneState::kReady;
  }
}

// A barrier for all threads waits only for those that are still there.
bool IsFull(int id) {
  const auto slot = static_cast<size_t>(id);
  const int wanted = block->expected[slot] != 0
                         ? block->expected[slot]
                         : static_cast<int>(block->lanes.size()) - block->num_left;
  return block->arrived[slot] > 0 && block->arrived[slot] >= wanted;
}

void PerformCopy(const PendingCopy& copy) {
  std::memcpy(copy.shared, copy.global, copy.valid_bytes);
  std::memset(static_cast<std::byte*>(copy.shared) + copy.valid_bytes, 0,
              copy.bytes - copy.valid_bytes);
}

// The layout of an emulated mbarrier.
struct BarrierState {
  uint64_t pending : 20;
  uint64_t arrivals : 20;
  uint64_t bytes : 23;
  uint64_t phase : 1;
};
static_assert(sizeof(BarrierState) == 8);

BarrierState Load(const uint64_t* barrier) {
  BarrierState state;
  std::memcpy(&state, barrier, sizeof(state));
  return state;
}
void Store(uint64_t* barrier, const BarrierState& state) {
  std::memcpy(barrier, &state, sizeof(state));
}
void TurnIfComplete(BarrierState& state) {
  if (state.pending != 0 || state.bytes != 0) return;
  state.phase ^= 1u;
  state.pending = state.arrivals;
}

std::string Describe() {
  std::string out;
  int listed = 0;
  for (size_t i = 0; i < block->lanes.size() && listed < 8; ++i) {
    const Lane& lane = block->lanes[i];
    if (lane.state == LaneState::kLeft) continue;
    ++listed;
    absl::StrAppend(&out, "\n  thread ", i);
    if (lane.state == LaneState::kAtBarrier) absl::StrAppend(&out, " at barrier ", lane.barrier);
    if (lane.state == LaneState::kSpins) absl::StrAppend(&out, " spins");
    if (lane.state == LaneState::kInExchange) {
      absl::StrAppend(&out, " in a collective of mask ", absl::Hex(lane.mask));
    }
  }
  return absl::StrCat(out, "\n  of ", block->lanes.size(), " threads ", block->num_left,
                      " have left");
}

void MakeLane(size_t i) {
  block->lanes[i].fiber = context::fiber(std::allocator_arg, context::fixedsize_stack(kStackBytes),
                                         [i](context::fiber&& scheduler) {
                                           block->scheduler = std::move(scheduler);
                                           while (!block->is_over) {
                                             (*block->body)();
                                             Lane& lane = block->lanes[i];
                                             if (!lane.open_group.empty()) CommitCopies();
                                             lane.groups.clear();
                                             ++block->num_left;
                                             lane.state = LaneState::kLeft;
                                             for (int id = 0; id < kNumBarriers; ++id) {
                                               if (IsFull(id)) ReleaseBarrier(id);
                                             }
                                             SwitchAway();
                                           }
                                           return std::move(block->scheduler);
                                         });
}

void Resume(size_t i) {
  block->running = static_cast<int>(i);
  Lane& lane = block->lanes[i];
  lane.fiber = std::move(lane.fiber).resume();
}

// Runs every lane until all have left.
void RunLanes() {
  const size_t count = block->lanes.size();
  auto last_progress = std::chrono::steady_clock::now();
  while (block->num_left < static_cast<int>(count)) {
    bool has_run = false;
    bool has_spun = false;
    for (size_t n = 0; n < count; ++n) {
      const size_t i = reverse_depth > 0 ? count - 1 - n : n;
      Lane& lane = block->lanes[i];
      if (lane.state != LaneState::kReady && lane.state != LaneState::kSpins) continue;
      lane.state = LaneState::kReady;
      Resume(i);
      (block->lanes[i].state == LaneState::kSpins ? has_spun : has_run) = true;
    }
    const auto now = std::chrono::steady_clock::now();
    if (has_run) {
      last_progress = now;
    } else if (!has_spun) {
      Fail(absl::StrCat("nobody can go on:", Describe()).c_str());
    } else if (now - last_progress > kStuckAfter) {
      Fail(absl::StrCat("everybody spins for 30 s:", Describe()).c_str());
    } else if (block->launch.is_cooperative) {
      std::this_thread::yield();
    }
  }
}

// Blocks [first, ...) in steps of `step`, with one set of fibers.
void RunBlocks(const GridLaunch& launch, uint64_t first, uint64_t step,
               absl::FunctionRef<void()> body) {
  Block own;
  own.launch = launch;
  own.body = &body;
  Block* const outer = block;
  block = &own;
  const size_t threads = size_t{launch.block.x} * launch.block.y * launch.block.z;
  own.lanes.resize(threads);
  own.storage.resize(launch.shared_bytes + 256);
  own.shared = own.storage.data() + 128 - reinterpret_cast<uintptr_t>(own.storage.data()) % 128;
  for (size_t i = 0; i < threads; ++i) {
    const auto n = static_cast<unsigned>(i);
    own.lanes[i].index = {n % launch.block.x, n / launch.block.x % launch.block.y,
                          n / launch.block.x / launch.block.y};
    MakeLane(i);
  }
  const uint64_t count = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  for (uint64_t b = first; b < count; b += step) {
    own.index = {static_cast<unsigned>(b % launch.grid.x),
                 static_cast<unsigned>(b / launch.grid.x % launch.grid.y),
                 static_cast<unsigned>(b / launch.grid.x / launch.grid.y)};
    own.warps.clear();
    own.warps.resize((threads + kWarp - 1) / kWarp);
    own.arrived.fill(0);
    own.expected.fill(0);
    own.num_left = 0;
    own.bulk.clear();
    std::memset(own.shared, kPoison, launch.shared_bytes);
    for (Lane& lane : own.lanes) lane.state = LaneState::kReady;
    RunLanes();
  }
  own.is_over = true;
  for (size_t i = 0; i < threads; ++i) Resume(i);  // Each fiber ends.
  block = outer;
}

Gathering& GatheringOf(Warp& warp, uint32_t mask) {
  for (const auto& one : warp.gatherings) {
    if (one->mask == mask) return *one;
  }
  warp.gatherings.push_back(std::make_unique<Gathering>());
  warp.gatherings.back()->mask = mask;
  return *warp.gatherings.back();
}

}  // namespace

const Dim3& ThreadIndex() { return Running().index; }
const Dim3& BlockIndex() { return block->index; }
const Dim3& BlockShape() { return block->launch.block; }
const Dim3& GridShape() { return block->launch.grid; }
int LaneIndex() { return block->running % kWarp; }
std::byte* SharedMemory() { return block->shared; }
size_t SharedBytes() { return block->launch.shared_bytes; }

void Fail(const char* what) {
  std::string place;
  if (block != nullptr) {
    place = absl::StrCat(" (block ", block->index.x, ", ", block->index.y, ", ", block->index.z,
                         ", thread ", block->running, ")");
  }
  CheckFailed(__FILE__, __LINE__, absl::StrCat("emulated kernel", place, ": ", what).c_str());
}

void SyncBlock(int id, int threads) {
  if (id < 0 || id >= kNumBarriers) Fail("a barrier's number is outside 0 to 15");
  const auto slot = static_cast<size_t>(id);
  block->expected[slot] = threads;
  ++block->arrived[slot];
  if (IsFull(id)) {
    ReleaseBarrier(id);
    return;
  }
  Running().barrier = id;
  Wait(LaneState::kAtBarrier);
}

void Yield() { Wait(LaneState::kSpins); }

void Exchange(uint32_t mask, const void* mine, size_t bytes, void* all) {
  if (bytes > kMaxExchangeBytes) Fail("a collective hands over more than 64 bytes a lane");
  const auto lane = static_cast<size_t>(LaneIndex());
  if ((mask >> lane & 1u) == 0) Fail("a lane calls a collective whose mask leaves it out");
  const auto first = static_cast<size_t>(block->running) - lane;
  Warp& warp = block->warps[first / kWarp];
  Gathering& gathering = GatheringOf(warp, mask);
  auto& slots = gathering.slots[gathering.turn[lane]++ % 2];
  std::memcpy(slots.data() + lane * kMaxExchangeBytes, mine, bytes);
  gathering.arrived |= 1u << lane;
  if (gathering.arrived != mask) {
    Running().mask = mask;
    Wait(LaneState::kInExchange);
  } else {
    gathering.arrived = 0;
    for (size_t i = first; i < std::min(first + kWarp, block->lanes.size()); ++i) {
      Lane& other = block->lanes[i];
      if (other.state == LaneState::kInExchange && other.mask == mask) {
        other.state = LaneState::kReady;
      }
    }
  }
  for (size_t i = 0; i < kWarp; ++i) {
    std::byte* out = static_cast<std::byte*>(all) + i * bytes;
    if ((mask >> i & 1u) != 0) {
      std::memcpy(out, slots.data() + i * kMaxExchangeBytes, bytes);
    } else {
      std::memset(out, 0, bytes);
    }
  }
}

void CopyAsync(void* shared, const void* global, size_t bytes, size_t valid_bytes) {
  if (reinterpret_cast<uintptr_t>(shared) % bytes != 0 ||
      (valid_bytes != 0 && reinterpret_cast<uintptr_t>(global) % bytes != 0)) {
    Fail("cp.async of a misaligned address");
  }
  Running().open_group.push_back({shared, global, bytes, valid_bytes});
}

void CommitCopies() {
  Lane& lane = Running();
  lane.groups.push_back(std::move(lane.open_group));
  lane.open_group.clear();
}

void WaitForCopies(int groups_left) {
  Lane& lane = Running();
  while (lane.groups.size() > static_cast<size_t>(groups_left)) {
    for (const PendingCopy& copy : lane.groups.front()) PerformCopy(copy);
    lane.groups.pop_front();
  }
}

void BulkCopy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  if (reinterpret_cast<uintptr_t>(shared) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(global) % 16 != 0 || bytes % 16 != 0 || bytes == 0) {
    Fail("cp.async.bulk needs addresses and a size that are multiples of 16");
  }
  std::memset(shared, kPoison, bytes);
  block->bulk.push_back({shared, global, bytes, barrier});
}

void BarrierInit(uint64_t* barrier, uint32_t arrivals) {
  BarrierState state = {};
  state.pending = arrivals;
  state.arrivals = arrivals;
  Store(barrier, state);
}

void BarrierArrive(uint64_t* barrier, uint32_t expected_bytes) {
  BarrierState state = Load(barrier);
  if (state.pending == 0) Fail("more arrivals at an mbarrier than it was made for");
  state.pending -= 1;
  state.bytes += expected_bytes;
  TurnIfComplete(state);
  Store(barrier, state);
}

bool BarrierTest(uint64_t* barrier, uint32_t parity) {
  BarrierState state = Load(barrier);
  for (size_t i = 0; i < block->bulk.size();) {
    const PendingBulk copy = block->bulk[i];
    // Bytes that nobody has announced yet wait for the announcement.
    if (copy.barrier != barrier || state.bytes < copy.bytes) {
      ++i;
      continue;
    }
    std::memcpy(copy.shared, copy.global, copy.bytes);
    state.bytes -= copy.bytes;
    block->bulk.erase(block->bulk.begin() + static_cast<ptrdiff_t>(i));
    TurnIfComplete(state);
  }
  Store(barrier, state);
  return state.phase != (parity & 1u);
}

void RunGrid(const GridLaunch& launch, absl::FunctionRef<void()> body) {
  const uint64_t threads = uint64_t{launch.block.x} * launch.block.y * launch.block.z;
  const uint64_t blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  if (threads == 0 || threads > kMaxThreads) Fail("a block has no thread or more than 1,024");
  if (blocks == 0 || launch.grid.y > 65535 || launch.grid.z > 65535) {
    Fail("a grid has no block, or more than 65,535 in y or z");
  }
  if (launch.shared_bytes > kMaxSharedBytes) Fail("a block asks for more than 101,376 bytes");
  if (!launch.is_cooperative) {
    RunBlocks(launch, 0, 1, body);
    return;
  }
  std::vector<std::thread> resident;
  const int reverse = reverse_depth;
  for (uint64_t b = 0; b < blocks; ++b) {
    resident.emplace_back([&launch, b, blocks, body, reverse] {
      reverse_depth = reverse;
      RunBlocks(launch, b, blocks, body);
    });
  }
  for (std::thread& one : resident) one.join();
}

ReverseOrder::ReverseOrder() { ++reverse_depth; }
ReverseOrder::~ReverseOrder() { --reverse_depth; }

}  // namespace isthmus::kernels::emulator

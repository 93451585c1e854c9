// Device memory and pinned memory.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <cstring>

#include "stream.h"

namespace fake {

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
inline const c10::Device kDevice(kDeviceType, 0);

inline std::map<const void*, BlockPtr>& blocks = *new std::map<const void*, BlockPtr>;  // guarded by `mutex`

inline BlockPtr block_at(const void* data) {
  Lock lock(mutex);
  auto found = blocks.find(data);
  return found == blocks.end() ? nullptr : found->second;
}

// An allocation on a stream may get any memory that was freed on it: whatever still uses that memory must come before.
// The check is made here, not at the free: until the next allocation nothing is wrong.
inline std::string reuse_freed_locked(Stream& stream) {
  std::string race;
  stream.clock.join(host);
  for (auto& block : stream.freed) {
    for (auto& a : block->accesses)
      if (a.stream != stream.id && a.number > stream.clock.of(a.stream) && !block->recorded.count(a.stream))
        race = "memory of stream " + std::to_string(stream.id) + " was freed and is reused while " + a.task +
            " on stream " + std::to_string(a.stream) + " may still use it (hold the tensor, or record_stream)";
    if (block->recorded.empty())  // else it is given out later
      push_locked(stream, "reuse", {{block, 0, block->size, false, true}},
          [block] { std::memset(block->data, 0xff, block->size); });
  }
  stream.freed.clear();
  return race;
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    auto block = std::make_shared<Block>(size, current_stream);
    std::memset(block->data, 0xff, size);  // NaN
    Lock lock(mutex);
    auto race = reuse_freed_locked(stream_locked(current_stream));
    if (!race.empty()) report_locked("fake: " + race);
    blocks[block->data] = block;
    return {block->data, block->data, &free, kDevice};
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (auto block = block_at(data.get())) {
      Lock lock(mutex);
      block->recorded.insert((int)stream.id());
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}

 private:
  static void free(void* data) {
    BlockPtr block;  // outlives the lock
    Lock lock(mutex);
    auto found = blocks.find(data);
    if (found == blocks.end()) return;
    block = found->second;
    blocks.erase(found);
    stream_locked(block->stream).freed.push_back(block);
  }
};
inline DeviceAllocator& device_allocator = *new DeviceAllocator;

// Host memory that copies can be asynchronous to and from.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    void* data = std::aligned_alloc(64, (size + 64) / 64 * 64);
    Lock lock(mutex_);
    sizes_[(const char*)data] = std::max<size_t>(size, 1);
    return {data, data, &free, c10::Device(c10::kCPU)};
  }
  bool owns(const void* data) {
    Lock lock(mutex_);
    auto next = sizes_.upper_bound((const char*)data);
    if (next == sizes_.begin()) return false;
    --next;
    return (const char*)data < next->first + next->second;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }

 private:
  static void free(void* data);
  std::mutex mutex_;  // not the one of the streams: a publication may free the last reference under that
  std::map<const char*, size_t> sizes_;
};
inline PinnedAllocator& pinned_allocator = *new PinnedAllocator;

inline void PinnedAllocator::free(void* data) {
  {
    Lock lock(pinned_allocator.mutex_);
    pinned_allocator.sizes_.erase((const char*)data);
  }
  std::free(data);
}

}  // namespace fake

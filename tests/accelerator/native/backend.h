// What torch asks of a backend: streams and events (guard), random numbers, hooks.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <map>

#include "allocator.h"

namespace fake {

constexpr auto kKey = c10::DispatchKey::PrivateUse1;

// By priority, streams that were made, and how many were given out again: CUDA has 32 of each. Size 0: always new ones.
inline size_t pool_size = 0;
inline auto& pools = *new std::map<int, std::pair<std::vector<int>, size_t>>;

// There is one device; each thread has a current stream.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  static constexpr c10::DeviceType static_type = kDeviceType;
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return handle(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return handle(0); }
  c10::Stream getNewStream(c10::Device, int priority) const override {
    Lock lock(mutex);
    stream_locked(0);
    auto& [ids, again] = pools[priority];
    if (pool_size && ids.size() >= pool_size) return handle(ids[again++ % pool_size]);
    return handle(ids.emplace_back(stream_locked((int)streams.size()).id));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return handle(std::exchange(current_stream, (int)stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(mutex);
    return query_locked(record_locked(stream_locked((int)stream.id())));
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream((int)stream.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    size_t count;
    {
      Lock lock(mutex);
      count = streams.size();
    }
    for (size_t id = 0; id < count; id++) synchronize_stream((int)id);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator.recordStream(data, stream);
  }

  // An event that was never recorded is complete.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mutex);
    if (!*event) *event = new Event;
    *(Event*)*event = record_locked(stream_locked((int)stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    Lock lock(mutex);
    if (event) wait_event_locked(stream_locked((int)stream.id()), *(Event*)event);
  }
  bool queryEvent(void* event) const override {
    Lock lock(mutex);
    return !event || query_locked(*(Event*)event);
  }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(*(Event*)event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(queryEvent(from) && queryEvent(to), "fake: elapsed_time of events that are not complete");
    Lock lock(mutex);
    return *((Event*)to)->at - *((Event*)from)->at;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Event*)event; }

 private:
  static c10::Stream handle(int id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
};

// Each operator takes one number from here when it is queued, and seeds a CPU generator of its own with it.
class Generator final : public at::CPUGeneratorImpl {
 public:
  Generator() : at::CPUGeneratorImpl(0) {
    device_ = kDevice;
    key_set_ = c10::DispatchKeySet(kKey);
  }
};
inline at::Generator& default_generator = *new at::Generator(at::make_generator<Generator>());
inline uint64_t draw_seed(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get<at::CPUGeneratorImpl>()->random64();
}

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* data) const override { return pinned_allocator.owns(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto fresh = device_allocator.allocate(size);
    auto from = block_at(impl->data()), to = block_at(fresh.get());
    auto kept = std::min(size, impl->nbytes());
    if (from && kept)
      launch("resize_", {{from, 0, kept, true, false}, {to, 0, kept, false, true}},
          [from, to, kept] { std::memcpy(to->data, from->data, kept); });
    impl->set_data_ptr(std::move(fresh));
    impl->set_nbytes(size);
  }
};

}  // namespace fake

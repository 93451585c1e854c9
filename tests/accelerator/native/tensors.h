// Tensors on the device: making, copying, resizing.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>

#include "backend.h"

namespace fake {

using at::Tensor;

inline bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDeviceType; }

// A tensor's bytes and layout, without the tensor: what a queued task keeps.
struct Layout {
  BlockPtr block;
  size_t offset = 0;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype = c10::ScalarType::Float;

  Layout() = default;
  explicit Layout(const Tensor& t)
      : block(block_at(t.storage().data())), offset(t.storage_offset() * t.itemsize()), sizes(t.sizes().vec()),
        strides(t.strides().vec()), dtype(t.scalar_type()) {}

  // The same memory as a tensor of the CPU. For use inside tasks.
  Tensor on_host() const {
    if (!block) return new_on_host();
    return at::from_blob(block->data + offset, sizes, strides, [kept = block](void*) {}, at::TensorOptions().dtype(dtype));
  }
  Tensor new_on_host() const { return at::empty_strided(sizes, strides, at::TensorOptions().dtype(dtype).device(c10::kCPU)); }
};

inline void add_use(std::vector<Use>& uses, const Tensor& tensor, bool reads, bool writes) {
  if (!tensor.numel()) return;
  auto block = block_at(tensor.storage().data());
  if (!block) return;
  size_t begin = tensor.storage_offset() * tensor.itemsize(), span = 1;
  for (int64_t i = 0; i < tensor.dim(); i++) span += (tensor.size(i) - 1) * tensor.stride(i);
  uses.push_back({block, begin, begin + span * tensor.itemsize(), reads, writes});
}

inline Tensor empty(at::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(
      sizes, &device_allocator, c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      sizes, strides, &device_allocator, c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
}

inline Tensor empty_as(const Tensor& pattern) {
  return empty_strided(pattern.sizes(), pattern.strides(), pattern.scalar_type(), {}, {}, {});
}

inline void copy_on_device(const Tensor& from, const Tensor& to) {
  std::vector<Use> uses;
  add_use(uses, from, true, false);
  add_use(uses, to, false, true);
  launch("copy_ D2D", uses, [a = Layout(from), b = Layout(to)] { b.on_host().copy_(a.on_host()); });
}

// Copies from pinned memory for which the host has not waited. Guarded by `mutex`.
struct Reading {
  int stream;
  uint64_t number;
  Tensor source, value;
};
inline std::vector<Reading>& readings = *new std::vector<Reading>;

inline bool was_changed(const Reading& r) {
  auto now = r.source.contiguous(), before = r.value.contiguous();
  return std::memcmp(now.const_data_ptr(), before.const_data_ptr(), before.nbytes()) != 0;
}

// Whether the host has changed what is copied: looked at with the next such copy, whatever the timing.
inline void check_readings() {
  Lock lock(mutex);
  std::erase_if(readings, [](auto& r) { return r.number <= host.of(r.stream); });
  if (!std::any_of(readings.begin(), readings.end(), was_changed)) return;
  readings.clear();
  report_locked("fake: host memory was changed, and nobody has waited for a copy from it");
}

inline void copy_to_device(const Tensor& from, const Tensor& to, bool non_blocking) {
  std::vector<Use> uses;
  add_use(uses, to, false, true);
  bool pinned = pinned_allocator.owns(from.const_data_ptr());
  bool asynchronous = non_blocking && pinned;
  if (!asynchronous) hidden_sync(pinned ? "copy_ H2D, blocking" : "copy_ H2D from pageable memory");
  check_readings();
  Reading reading{current_stream, 0, from.detach(), from.clone()};
  reading.number = launch("copy_ H2D", uses, [b = Layout(to), reading] {
    TORCH_CHECK(!was_changed(reading), "host memory was changed while a copy from it was under way");
    b.on_host().copy_(reading.value);
  });
  if (!asynchronous) return synchronize_stream(current_stream);
  Lock lock(mutex);
  readings.push_back(reading);
}

inline void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool pinned = pinned_allocator.owns(to.const_data_ptr());
  bool asynchronous = non_blocking && pinned;
  if (!asynchronous) hidden_sync(pinned ? "copy_ D2H, blocking" : "copy_ D2H into pageable memory");
  std::vector<Use> uses;
  // Garbage may be on its way to the host: who waits for it can look for errors before the value is used.
  add_use(uses, from, !asynchronous, false);
  auto value = std::make_shared<Tensor>();
  auto number = launch("copy_ D2H", uses, [a = Layout(from), value] { *value = a.on_host().clone(); });
  auto show = [target = to.detach(), value] {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    target.copy_(*value);
  };
  if (!asynchronous) {
    synchronize_stream(current_stream);
    show();
    return;
  }
  if (to.is_contiguous()) std::memset(to.mutable_data_ptr(), 0xff, to.nbytes());
  Lock lock(mutex);
  publications.push_back({current_stream, number, show});
}

inline Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  if (on_device(from) && on_device(to)) copy_on_device(from, to);
  else if (on_device(to)) copy_to_device(from, to, non_blocking);
  else copy_to_host(from, to, non_blocking);
  return to;
}

inline const Tensor& resize_(const Tensor& self, at::IntArrayRef sizes, std::optional<c10::MemoryFormat>) {
  size_t needed = (c10::multiply_integers(sizes) + self.storage_offset()) * self.itemsize();
  if (needed > self.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

inline Tensor& set_storage(
    Tensor& self, c10::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (strides.empty()) impl->set_sizes_contiguous(sizes);
  else impl->set_sizes_and_strides(sizes, strides);
  return self;
}
inline Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  int64_t count = storage.nbytes() / self.itemsize();
  return set_storage(self, std::move(storage), 0, {count}, {});
}
inline Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return set_storage(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

// The CPU's kernel has no generator argument: on a stream's thread it would draw from the CPU's own, at any time.
inline std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask.to(at::kBool)};
}

}  // namespace fake

// A fake asynchronous accelerator, device `fake` (torch's PrivateUse1). Its memory is the host's, its kernels are the
// CPU's, and its streams are queues with a thread each. See README.md.
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>

#include "fallback.h"

namespace fake {
namespace {

REGISTER_ALLOCATOR(kDeviceType, &device_allocator)
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

void record_stream(Tensor& tensor, c10::Stream stream) {
  device_allocator.recordStream(tensor.storage().data_ptr(), stream);
}

// Queues a function of the host on the current stream. `function` is a C function's address, called with `token`.
void enqueue(int64_t function, int64_t token, std::vector<Tensor> reads, std::vector<Tensor> writes, std::string name) {
  std::vector<Use> uses;
  for (auto& tensor : reads) add_use(uses, tensor, true, false);
  for (auto& tensor : writes) add_use(uses, tensor, false, true);
  launch(name, uses, [function, token] { ((void (*)(int64_t))function)(token); });
}

void fail(std::string text) {
  Lock lock(mutex);
  if (device_error.empty()) device_error = text;
}

void hold(int64_t id, bool on) {
  Lock lock(mutex);
  auto& stream = stream_locked((int)id);
  stream.held = on;
  stream.arrival.notify_one();
}

void mark_garbage(const Tensor& tensor, std::string why) {
  if (auto block = block_at(tensor.storage().data())) block->set_garbage(why);
}

std::vector<std::string> take_reports() {
  Lock lock(mutex);
  device_error.clear();
  return std::exchange(reports, {});
}

TORCH_LIBRARY(fallow_fake, m) {
  m.def("enqueue(int function, int token, Tensor[] reads, Tensor[] writes, str name) -> ()", enqueue);
  m.def("host_view(Tensor tensor) -> Tensor", [](const Tensor& tensor) { return Layout(tensor).on_host(); });
  m.def("fail(str text) -> ()", fail);
  m.def("report_syncs(bool on) -> ()", [](bool on) { report_syncs = on; });
  m.def("hold(int stream, bool on) -> ()", hold);
  m.def("pool_streams(int size) -> ()", [](int64_t size) { pool_size = size; });
  m.def("mark_garbage(Tensor tensor, str why) -> ()", mark_garbage);
  m.def("speculate(bool on) -> ()", [](bool on) { speculative = on; });
  m.def("take_reports() -> str[]", take_reports);
  m.def("get_rng_state() -> Tensor", [] { return default_generator.get_state(); });
  m.def("set_rng_state(Tensor state) -> ()", [](const Tensor& state) { default_generator.set_state(state); });
  m.def("seed(int seed) -> ()", [](int64_t seed) { default_generator.set_current_seed((uint64_t)seed); });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("view.dtype", at::native::view_dtype);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("native_dropout", native_dropout);
  // The composite kernel that torch would take gives other bits than the CPU's own.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace fake

// Every other operator: its results' metadata come from the kernel for `meta`, its values later from the CPU's kernel,
// which a task runs on the same memory.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <unordered_map>

#include "tensors.h"

namespace fake {

using c10::IValue;

// Replaces each tensor in `value`, also in lists of (optional) tensors.
template <class F>
IValue map_tensors(const IValue& value, F replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& tensor : value.toTensorVector()) mapped.push_back(replace(tensor));
    return mapped;
  }
  if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
    auto list = value.toList();
    c10::List<std::optional<Tensor>> mapped;
    for (const IValue& element : list) {
      if (!element.isNone() && !element.isTensor()) return value;
      mapped.push_back(element.isNone() ? std::nullopt : std::optional<Tensor>(replace(element.toTensor())));
    }
    return mapped;
  }
  return value;
}

// The size of results depends on values: on a GPU the host waits for them.
inline bool depends_on_values(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments) {
  static const std::set<std::string> names = {"aten::nonzero", "aten::masked_select", "aten::_unique2",
      "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave", "aten::bincount", "aten::histc"};
  if (names.count(schema.name())) return true;
  for (auto& returned : schema.returns()) {
    auto kind = returned.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return true;
  }
  // A mask as an index is turned into numbers first.
  bool mask = false;
  for (size_t i = 0; i < arguments.size(); i++)
    if (schema.arguments()[i].name() == "indices")
      map_tensors(arguments[i], [&](const Tensor& t) -> Tensor {
        mask = mask || (t.defined() && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte));
        return t;
      });
  return mask;
}

// Metadata of results, by operator and metadata of its arguments: most kernels for `meta` are in Python, and slow.
class MetaCache {
 public:
  struct Entry {
    std::vector<IValue> results, arguments;  // `arguments` after the call: `out=` may have another size
  };
  const Entry* find(const std::string& key) {
    Lock lock(mutex_);
    auto found = entries_.find(key);
    return found == entries_.end() ? nullptr : found->second.get();
  }
  const Entry* add(const std::string& key, Entry entry) {
    Lock lock(mutex_);
    auto& slot = entries_[key];
    if (!slot) slot = std::make_unique<Entry>(std::move(entry));
    return slot.get();
  }

  // Appends to `key` all that results' metadata may depend on. False for types that have no key.
  static bool append(std::string& key, const IValue& v) {
    auto put = [&key](const auto& plain) { key.append((const char*)&plain, sizeof plain); };
    put(v.isNone() ? 'n' : v.isInt() ? 'i' : v.isDouble() ? 'd' : v.isBool() ? 'b' : v.isTensor() ? 't'
        : v.isList() ? 'l' : v.isString() ? 's' : v.isDevice() ? 'D' : '?');
    if (v.isNone() || v.isDevice()) return true;
    if (v.isInt()) return put(v.toInt()), true;
    if (v.isDouble()) return put(v.toDouble()), true;
    if (v.isBool()) return put(v.toBool()), true;
    if (v.isString()) return put(v.toStringRef().size()), key += v.toStringRef(), true;
    if (v.isTensor()) {
      const auto& tensor = v.toTensor();
      put(tensor.defined());
      if (!tensor.defined()) return true;
      put(tensor.scalar_type());
      put(tensor.dim());
      put(tensor.unsafeGetTensorImpl()->is_wrapped_number());
      put(on_device(tensor));
      for (int64_t i = 0; i < tensor.dim(); i++) put(tensor.size(i)), put(tensor.stride(i));
      return true;
    }
    if (!v.isList()) return false;
    put(v.toListRef().size());
    for (const auto& element : v.toListRef())
      if (!append(key, element)) return false;
    return true;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, std::unique_ptr<Entry>> entries_;
};
inline MetaCache& meta_cache = *new MetaCache;

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, std::vector<IValue> arguments)
      : op_(op), schema_(op.schema()), parameters_(schema_.arguments()), arguments_(std::move(arguments)),
        operands_(std::make_shared<std::vector<Operand>>()) {}

  std::vector<IValue> run() {
    for (const auto& returned : schema_.returns())
      TORCH_CHECK(!returned.alias_info() || returned.alias_info()->isWrite(), "fake: no view kernel for ", schema_.name());
    bool values_decide = depends_on_values(schema_, arguments_);
    read_arguments();
    if (!values_decide && returns_arguments_only()) return queue({});
    const MetaCache::Entry* meta = values_decide ? nullptr : infer();
    if (!meta) return compute_now(values_decide ? "" : " (no meta kernel)");
    resize_outputs(*meta);
    return queue(meta->results);
  }

 private:
  struct Operand {
    bool device = false;
    Layout layout;  // on the device
    Tensor host;    // else; may be undefined
  };
  using Kernel = std::function<std::vector<IValue>()>;

  // What is touched, and what is passed to the CPU's kernel.
  void read_arguments() {
    bool indexes = schema_.name().rfind("aten::index", 0) == 0 || schema_.name() == "aten::_index_put_impl_";
    bool overwrites = schema_.name() == "aten::zero_" || schema_.name() == "aten::fill_";
    for (size_t i = 0; i < parameters_.size(); i++) {
      const auto* alias = parameters_[i].alias_info();
      bool writes = alias && alias->isWrite();
      bool reads = !writes || !(parameters_[i].is_out() || overwrites);
      first_operand_.push_back(operands_->size());
      map_tensors(arguments_[i], [&](const Tensor& tensor) -> Tensor {
        Operand operand;
        if (on_device(tensor)) {
          operand.device = true;
          operand.layout = Layout(tensor);
          add_use(uses_, tensor, reads, writes);
        } else if (tensor.defined()) {
          if (tensor.dim() && indexes) hidden_sync(schema_.name() + ": index copied from the host");
          TORCH_CHECK(!tensor.dim() || indexes, "Expected all tensors to be on the same device, but ", schema_.name(),
              " got a tensor on ", kDevice, " and one on ", tensor.device());
          operand.host = tensor.clone();
          operand.host.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
        }
        operands_->push_back(std::move(operand));
        return tensor;
      });
      if (parameters_[i].name() == "generator") {
        seed_ = draw_seed(arguments_[i].isGenerator() ? arguments_[i].toGenerator() : default_generator);
        arguments_[i] = IValue();
      }
    }
  }

  bool returns_arguments_only() const {
    for (const auto& parameter : parameters_)
      if (parameter.is_out()) return false;
    for (const auto& returned : schema_.returns())
      if (!returned.alias_info()) return false;
    return true;
  }

  // Null where there is no kernel for `meta`, or it needs values, or refuses: then the CPU's kernel is asked at once.
  const MetaCache::Entry* infer() const {
    std::string key = schema_.name() + "." + schema_.overload_name() + "|";
    key += (char)c10::get_default_dtype_as_scalartype();
    bool has_key = true;
    for (const auto& argument : arguments_) has_key = has_key && MetaCache::append(key, argument);
    if (has_key)
      if (const auto* entry = meta_cache.find(key)) return entry;
    auto stack = arguments_;
    for (auto& argument : stack) {
      if (argument.isDevice()) argument = c10::Device(c10::kMeta);
      // Numbers that were wrapped in a tensor must stay on the CPU.
      argument = map_tensors(argument, [](const Tensor& t) -> Tensor {
        if (!on_device(t)) return t;
        return at::empty_strided(t.sizes(), t.strides(), at::TensorOptions().dtype(t.scalar_type()).device(c10::kMeta));
      });
    }
    auto results = stack;
    try {
      op_.callBoxed(&results);
    } catch (const std::exception&) {
      return nullptr;
    }
    MetaCache::Entry entry{std::move(results), std::move(stack)};
    if (has_key) return meta_cache.add(key, std::move(entry));
    static thread_local MetaCache::Entry last;
    last = std::move(entry);
    return &last;
  }

  void resize_outputs(const MetaCache::Entry& meta) {
    for (size_t i = 0; i < parameters_.size(); i++) {
      if (!parameters_[i].is_out() || !arguments_[i].isTensor()) continue;
      auto out = arguments_[i].toTensor();
      auto sizes = meta.arguments[i].toTensor().sizes();
      if (out.sizes() == sizes) continue;
      resize_(out, sizes, std::nullopt);
      (*operands_)[first_operand_[i]].layout = Layout(out);
      add_use(uses_, out, false, true);
    }
  }

  // Holds no tensor of the device: one that is freed while the kernel is queued must be seen to be.
  Kernel kernel() const {
    auto plain = arguments_;
    for (auto& argument : plain) argument = map_tensors(argument, [](const Tensor&) { return Tensor(); });
    return [op = op_, arguments = std::move(plain), operands = operands_, seed = seed_] {
      const auto& parameters = op.schema().arguments();
      std::vector<std::pair<const Layout*, Tensor>> outputs;
      std::vector<IValue> stack;
      size_t next = 0;
      for (size_t i = 0; i < arguments.size(); i++) {
        stack.push_back(map_tensors(arguments[i], [&](const Tensor&) -> Tensor {
          const auto& operand = (*operands)[next++];
          if (!operand.device) return operand.host;
          if (!parameters[i].is_out()) return operand.layout.on_host();
          outputs.emplace_back(&operand.layout, operand.layout.new_on_host());  // some kernels resize it on their way
          return outputs.back().second;
        }));
        if (stack.back().isDevice()) stack.back() = c10::Device(c10::kCPU);
        if (seed && parameters[i].name() == "generator") stack.back() = at::detail::createCPUGenerator(*seed);
      }
      op.callBoxed(&stack);
      for (auto& [layout, value] : outputs) layout->on_host().copy_(value);
      return stack;
    };
  }

  // The argument that is this return, if it is one.
  std::optional<IValue> returned_argument(size_t r) const {
    const auto* alias = schema_.returns()[r].alias_info();
    if (!alias) return std::nullopt;
    for (size_t i = 0; i < parameters_.size(); i++)
      if (parameters_[i].alias_info() && *parameters_[i].alias_info() == *alias) return arguments_[i];
    return std::nullopt;
  }

  std::vector<IValue> queue(const std::vector<IValue>& meta_results) {
    std::vector<IValue> returned;
    auto targets = std::make_shared<std::vector<std::vector<Layout>>>(schema_.returns().size());
    for (size_t r = 0; r < targets->size(); r++) {
      if (auto argument = returned_argument(r)) {
        returned.push_back(*argument);
        continue;
      }
      returned.push_back(map_tensors(meta_results.at(r), [&](const Tensor& pattern) -> Tensor {
        if (!pattern.defined()) return (*targets)[r].emplace_back(), pattern;
        auto result = empty_as(pattern);
        (*targets)[r].emplace_back(result);
        add_use(uses_, result, false, true);
        return result;
      }));
    }
    launch(schema_.name(), uses_, [kernel = kernel(), targets] {
      auto results = kernel();
      for (size_t r = 0; r < targets->size(); r++) {
        size_t next = 0;
        if ((*targets)[r].empty()) continue;
        map_tensors(results[r], [&](const Tensor& value) -> Tensor {
          const auto& target = (*targets)[r][next++];
          if (value.defined() && target.block) target.on_host().copy_(value);
          return value;
        });
      }
    });
    return returned;
  }

  std::vector<IValue> compute_now(const std::string& why) {
    hidden_sync(schema_.name() + why);
    auto results = std::make_shared<std::vector<IValue>>();
    launch(schema_.name(), uses_, [kernel = kernel(), results] { *results = kernel(); });
    synchronize_stream(current_stream);
    std::vector<IValue> returned;
    for (size_t r = 0; r < schema_.returns().size(); r++) {
      auto argument = returned_argument(r);
      returned.push_back(argument ? *argument : map_tensors((*results)[r], [&](const Tensor& value) -> Tensor {
        if (!value.defined()) return value;
        auto result = empty_as(value);
        std::vector<Use> uses;
        add_use(uses, result, false, true);
        launch(schema_.name(), uses, [target = Layout(result), value] { target.on_host().copy_(value); });
        return result;
      }));
    }
    return returned;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::vector<c10::Argument>& parameters_;
  std::vector<IValue> arguments_;
  std::shared_ptr<std::vector<Operand>> operands_;  // all tensors among the arguments, in order
  std::vector<size_t> first_operand_;               // by argument
  std::vector<Use> uses_;
  std::optional<uint64_t> seed_;
};

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto first = stack->end() - (ptrdiff_t)op.schema().arguments().size();
  auto returned = Call(op, std::vector<IValue>(first, stack->end())).run();
  stack->erase(first, stack->end());
  for (auto& value : returned) stack->push_back(std::move(value));
}

}  // namespace fake

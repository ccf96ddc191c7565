// A CUDA device in host memory, for a torch that was built without CUDA: kernels of the dispatch key CUDA run those of the CPU on the
// same bytes. Streams have vector clocks, as in a race detector of threads: every access of an operation to device or pinned memory is
// compared with earlier ones of other streams that nothing (event, wait, synchronization) orders before it.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/record_function.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <list>
#include <map>
#include <mutex>
#include <set>

namespace {

using at::IValue;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using c10::StreamId;

const Device DEVICE(DeviceType::CUDA, 0);
constexpr StreamId HOST = -1;  // the host is the party that launches; its own accesses to pinned memory are of this "stream"

// -- what happens before what --

using Clock = std::map<StreamId, uint64_t>;

struct Access {
  const char *begin, *end;
  bool writes;
  StreamId stream;
  uint64_t time;
  std::string by;
};

struct Block {  // of memory, by its first address
  size_t nbytes;
  bool pinned;
  StreamId stream;  // that it was allocated on
  std::set<StreamId> kept_for;  // record_stream
  std::list<Access> accesses;
};

std::recursive_mutex mutex;  // whoever holds it copies no tensor and no storage: that may wait for Python's lock
using Lock = std::lock_guard<std::recursive_mutex>;
std::map<StreamId, Clock> clocks;
std::map<const char*, Block> blocks;
std::vector<std::string> races;
size_t allocated = 0, peak = 0;
StreamId streams_made = 0;
thread_local StreamId current = 0;
thread_local bool inside = false;  // an operation of the device that runs as operations of the CPU
thread_local std::vector<std::string> fresh;  // races that this thread has not been told of

void join(Clock& clock, const Clock& other) {
  for (const auto& [stream, time] : other) clock[stream] = std::max(clock[stream], time);
}

void host_waits_for(StreamId stream) { join(clocks[HOST], clocks[stream]); }

bool is_before(const Access& access, const Clock& clock) {
  auto found = clock.find(access.stream);
  return found != clock.end() && access.time <= found->second;
}

Block* block_of(const void* address) {
  auto after = blocks.upper_bound(static_cast<const char*>(address));
  if (after == blocks.begin()) return nullptr;
  --after;
  return static_cast<const char*>(address) < after->first + after->second.nbytes ? &after->second : nullptr;
}

std::string named(StreamId stream) { return stream == HOST ? "the host" : c10::str("stream ", stream); }

void report(std::string text) {
  races.push_back(text);
  fresh.push_back(std::move(text));
}

// The next operation of a stream: what the host knows to be done is done for it.
void launch(StreamId stream) {
  if (stream != HOST) join(clocks[stream], clocks[HOST]);
  ++clocks[stream][stream];
}

void touch(const Tensor& tensor, bool writes, StreamId stream, const std::string& by) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return;
  const char* base = static_cast<const char*>(tensor.storage().data());
  Block* block = base ? block_of(base) : nullptr;
  if (!block || (stream == HOST && !block->pinned)) return;
  int64_t first = tensor.storage_offset(), last = first;
  for (int64_t d = 0; d < tensor.dim(); ++d) (tensor.stride(d) < 0 ? first : last) += (tensor.size(d) - 1) * tensor.stride(d);
  const char *begin = base + first * tensor.itemsize(), *end = base + (last + 1) * tensor.itemsize();
  const Clock& clock = clocks[stream];
  for (auto i = block->accesses.begin(); i != block->accesses.end();) {
    if (i->begin < end && begin < i->end && (writes || i->writes) && i->stream != stream && !is_before(*i, clock))
      report(c10::str(by, writes ? " writes " : " reads ", tensor.sizes(), " on ", named(stream), ", which nothing orders after ", i->by,
                      i->writes ? "'s write on " : "'s read on ", named(i->stream)));
    bool covered = begin <= i->begin && i->end <= end && (writes || (!i->writes && i->stream == stream));
    i = covered ? block->accesses.erase(i) : std::next(i);
  }
  block->accesses.push_back({begin, end, writes, stream, clock.at(stream), by});
}

void forget(const char* begin) {
  auto found = blocks.find(begin);
  if (found == blocks.end()) return;
  const Block& block = found->second;
  Clock known = clocks[block.stream];
  join(known, clocks[HOST]);
  if (!block.pinned) {  // torch's allocator of pinned memory waits for copies; the device's gives a block to its stream's next tensor
    for (const auto& access : block.accesses)
      if (access.stream != block.stream && !block.kept_for.count(access.stream) && !is_before(access, known))
        races.push_back(c10::str("memory of ", named(block.stream), " is freed while ", access.by, " on ", named(access.stream),
                                 " may use it; record_stream or a wait would keep it"));
    allocated -= block.nbytes;
  }
  blocks.erase(found);
}

// -- memory --

void release_block(void* p) {
  if (!p) return;
  Lock lock(mutex);
  forget(static_cast<const char*>(p));
  free(p);
}

struct Memory final : c10::Allocator {
  explicit Memory(bool pinned) : pinned(pinned) {}
  bool pinned;
  c10::DataPtr allocate(size_t n) override {
    Device device = pinned ? Device(DeviceType::CPU) : DEVICE;
    if (!n) return {nullptr, nullptr, &release_block, device};
    auto* p = static_cast<char*>(aligned_alloc(512, (n + 511) / 512 * 512));
    TORCH_CHECK(p, "out of memory");
    memset(p, 0xff, n);  // what is not written is NaN
    Lock lock(mutex);
    blocks[p] = {n, pinned, current, {}, {}};
    if (!pinned) peak = std::max(peak, allocated += n);
    return {p, p, &release_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_block; }
  void copy_data(void* to, const void* from, std::size_t n) const override { memcpy(to, from, n); }
};
Memory device_memory(false), pinned_memory(true);
REGISTER_ALLOCATOR(DeviceType::CUDA, &device_memory);

// -- streams, events, generators --

struct Event {
  Clock clock;
  double at = 0;
};

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return DEVICE; }
  Device getDevice() const override { return DEVICE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return stream_of(current); }
  Stream getDefaultStream(Device) const override { return stream_of(0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device, int) const override {
    Lock lock(mutex);
    return stream_of(++streams_made);
  }
  Stream exchangeStream(Stream stream) const override {
    auto before = current;
    current = stream.id();
    return stream_of(before);
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mutex);
    if (!*event) *event = new Event;
    launch(stream.id());
    *static_cast<Event*>(*event) = {clocks[stream.id()], seconds()};
  }
  void block(void* event, const Stream& stream) const override {
    Lock lock(mutex);
    if (event) join(clocks[stream.id()], static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override { return synchronizeEvent(event), true; }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const Stream& stream) const override { return synchronizeStream(stream), true; }
  void synchronizeStream(const Stream& stream) const override {
    Lock lock(mutex);
    host_waits_for(stream.id());
  }
  void synchronizeEvent(void* event) const override {
    Lock lock(mutex);
    if (event) join(clocks[HOST], static_cast<Event*>(event)->clock);
  }
  void synchronizeDevice(const DeviceIndex) const override {
    Lock lock(mutex);
    for (StreamId stream = 0; stream <= streams_made; ++stream) host_waits_for(stream);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    Lock lock(mutex);
    if (Block* block = data.get() ? block_of(data.get()) : nullptr) block->kept_for.insert(stream.id());
  }
  double elapsedTime(void* start, void* stop, const DeviceIndex) const override {
    return (static_cast<Event*>(stop)->at - static_cast<Event*>(start)->at) * 1e3;
  }
  static Stream stream_of(StreamId id) { return Stream(Stream::UNSAFE, DEVICE, id); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct DeviceGenerator final : at::CPUGeneratorImpl {
  DeviceGenerator() : CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = DEVICE;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
  at::Generator of_cpu = at::detail::createCPUGenerator();
};

}  // namespace

namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    static auto generator = at::make_generator<DeviceGenerator>();
    return generator;
  }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<DeviceGenerator>(); }
  Device getDeviceFromPtr(void*) const override { return DEVICE; }
  bool isPinnedPtr(const void* p) const override {
    Lock lock(mutex);
    Block* block = block_of(p);
    return block && block->pinned;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  void deviceSynchronize(DeviceIndex) const override { Guard().synchronizeDevice(0); }
};

// torch keeps the hooks that it found when it was imported: objects without members, of which this one's functions take the place.
const bool hooked = [] {
  static const CUDAHooks hooks;
  static_assert(sizeof(CUDAHooks) == sizeof(void*) && sizeof(CUDAHooksInterface) == sizeof(void*));
  memcpy(const_cast<void*>(static_cast<const void*>(&detail::getCUDAHooks())), static_cast<const void*>(&hooks), sizeof(void*));
  return true;
}();
}  // namespace at

namespace {

// -- operations --

// The memory of a tensor as a tensor of the CPU.
Tensor host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  c10::Storage storage = tensor.storage();
  c10::DataPtr data(storage.mutable_data(), new c10::Storage(storage), [](void* p) { delete static_cast<c10::Storage*>(p); },
                    Device(DeviceType::CPU));
  c10::Storage of_cpu(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(of_cpu), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

struct Inside {
  bool before = inside;
  Inside() { inside = true; }
  ~Inside() { inside = before; }
};

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device>, std::optional<bool>) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, c10::dtype_or_default(dtype));
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, &device_memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor on_device(const Tensor& value) {
  if (!value.defined() || value.is_cuda()) return value;
  Tensor dense = value.is_non_overlapping_and_dense() ? value : value.contiguous();
  Tensor made = empty_strided(dense.sizes(), dense.strides(), dense.scalar_type(), {}, {}, {});
  host(made).copy_(dense);
  return made;
}

void tell() {  // of races, where Python's traceback shows who ran into them
  if (fresh.empty()) return;
  std::string text = c10::Join("\n", fresh);
  fresh.clear();
  TORCH_CHECK(!getenv("EMULATED_CUDA_STRICT"), "a race of streams: ", text);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Inside now;
  const Tensor& other = from.is_cuda() ? to : from;
  bool pinned = other.is_cpu() && at::detail::getCUDAHooks().isPinnedPtr(other.storage().data());
  {
    Lock lock(mutex);
    launch(current);
    touch(from, false, current, "copy_");
    touch(to, true, current, "copy_");
    if (!other.is_cuda() && !(non_blocking && pinned)) host_waits_for(current);
  }
  at::NoGradGuard no_grad;
  host(to).copy_(host(from));
  tell();
  return to;
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  copy_from(from, to, non_blocking);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  Inside now;
  {
    Lock lock(mutex);
    launch(current);
    touch(tensor, false, current, "item");
    host_waits_for(current);
  }
  return host(tensor).item();
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void resize_bytes(const c10::Storage& storage, size_t nbytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::DataPtr made = device_memory.allocate(nbytes);
  if (size_t kept = std::min(nbytes, impl->nbytes())) memcpy(made.get(), impl->data(), kept);
  impl->set_data_ptr_noswap(std::move(made));
  impl->set_nbytes(nbytes);
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  size_t nbytes = (c10::multiply_integers(sizes) + self.storage_offset()) * self.itemsize();
  if (nbytes > self.storage().nbytes()) resize_bytes(self.storage(), nbytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
    impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  } else {
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.guard_int(__FILE__, __LINE__));
  }
  return self;
}

Tensor& set_whole(Tensor& self, at::Storage source) {
  int64_t numel = source.nbytes() / self.dtype().itemsize();
  return set_storage(self, source, 0, std::vector<c10::SymInt>{numel}, std::vector<c10::SymInt>{1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

Tensor& set_nothing(Tensor& self) { return set_whole(self, at::Storage(c10::Storage::use_byte_size_t(), 0, &device_memory, true)); }

void record_stream(Tensor& self, Stream stream) { Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream); }

int64_t attention_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;  // the mathematical one: others are kernels of CUDA alone
}

// As CUDA, of integers too.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  {
    Lock lock(mutex);
    launch(current);
    touch(self, false, current, "histc");
  }
  Inside now;
  return on_device(at::histc(host(self).to(at::kFloat), bins, low, high).to(self.scalar_type()));
}

// As CUDA: a tensor of the CPU beside one of the device is an error, unless it has no dimensions.
void refuse_two_devices(const std::string& name, const std::vector<Tensor>& tensors) {
  static const std::set<std::string> mixed = {"aten::index", "aten::_index_put_impl_", "aten::index_put", "aten::index_put_"};
  if (mixed.count(name) || name.find("_foreach") != std::string::npos) return;
  bool any = std::any_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return t.is_cuda(); });
  for (const auto& t : tensors)
    TORCH_CHECK(!any || t.is_cuda() || (t.is_cpu() && t.dim() == 0), "Expected all tensors to be on the same device, but found at least ",
                "two devices, cuda:0 and ", t.device(), "! (", name, " of ", t.sizes(), ")");
}

struct Silent final : c10::WarningHandler {  // the CPU's own, of memory that an operation gives itself
  void process(const c10::Warning&) override {}
} silent;

// Any other operation: the CPU's, on the same bytes.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  size_t begin = stack->size() - arguments.size();
  std::vector<Tensor> given, hosts, read, written;
  auto swap = [&](const Tensor& tensor, bool writes) {
    if (!tensor.defined()) return tensor;
    given.push_back(tensor);
    hosts.push_back(host(tensor));
    if (tensor.is_cuda() && tensor.layout() == at::kStrided) (writes ? written : read).push_back(tensor);
    return hosts.back();
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    IValue& value = (*stack)[begin + i];
    bool writes = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    if (value.isTensor()) {
      value = swap(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      std::vector<Tensor> swapped;
      for (const Tensor& tensor : value.toTensorVector()) swapped.push_back(swap(tensor, writes));
      value = swapped;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> swapped;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
        swapped.push_back(tensor ? std::optional<Tensor>(swap(*tensor, writes)) : std::nullopt);
      value = swapped;
    } else if (value.isDevice()) {
      value = Device(DeviceType::CPU);
    } else if (value.isGenerator() && value.toGenerator().defined() && value.toGenerator().device().is_cuda()) {
      value = value.toGenerator().get<DeviceGenerator>()->of_cpu;
    }
  }
  refuse_two_devices(schema.name(), given);
  {
    Inside now;
    Lock lock(mutex);
    launch(current);
    for (const auto& tensor : read) touch(tensor, false, current, schema.name());
    for (const auto& tensor : written) touch(tensor, true, current, schema.name());
  }
  tell();
  Inside now;
  c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  auto back = [&](const Tensor& made) -> Tensor {
    if (!made.defined()) return made;
    for (size_t i = 0; i < hosts.size(); ++i) {
      if (!hosts[i].is_same(made)) continue;
      if (given[i].is_cuda() && given[i].sizes() != made.sizes()) {  // an `out` that the operation resized
        given[i].resize_(made.sizes());
        host(given[i]).copy_(made);
      }
      return given[i];
    }
    Tensor out = on_device(made);
    Lock lock(mutex);
    touch(out, true, current, schema.name());
    return out;
  };
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = back(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> swapped;
      for (const Tensor& tensor : value.toTensorVector()) swapped.push_back(back(tensor));
      value = swapped;
    }
  }
}

// The host's own operations on pinned memory, which copies of streams may still read or write.
std::unique_ptr<at::ObserverContext> host_operation(const at::RecordFunction& call) {
  if (inside || !call.operator_schema()) return nullptr;
  const auto& arguments = call.operator_schema()->arguments();
  const auto inputs = call.inputs();
  if (arguments.size() != inputs.size()) return nullptr;
  std::vector<std::pair<const Tensor*, bool>> used;  // and whether it is written
  std::list<std::vector<Tensor>> lists;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias && !alias->isWrite()) continue;  // a view
    if (inputs[i].isTensor()) {
      used.push_back({&inputs[i].toTensor(), alias != nullptr});
    } else if (inputs[i].isTensorList()) {
      for (const Tensor& tensor : lists.emplace_back(inputs[i].toTensorVector())) used.push_back({&tensor, alias != nullptr});
    }
  }
  for (const auto& [tensor, _] : used)
    if (tensor->defined() && tensor->is_cuda()) return nullptr;  // an operation of the device
  for (const auto& [tensor, writes] : used) {
    if (!tensor->defined() || !tensor->is_cpu() || !tensor->has_storage()) continue;
    Lock lock(mutex);
    launch(HOST);
    touch(*tensor, writes, HOST, call.operator_schema()->name());
  }
  return nullptr;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("resize_", resize);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", attention_choice);
  m.impl("histc", histc);
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY(emulated_cuda, m) {
  m.def("host(Tensor(a) tensor) -> Tensor(a)", [](const Tensor& tensor) { return host(tensor); });
  m.def("memory() -> int[]", [] {
    Lock lock(mutex);
    return std::vector<int64_t>{int64_t(allocated), int64_t(peak)};
  });
  m.def("reset_peak() -> ()", [] {
    Lock lock(mutex);
    peak = allocated;
  });
  m.def("resize_storage(Tensor tensor, int nbytes) -> ()", [](const Tensor& tensor, int64_t n) { resize_bytes(tensor.storage(), n); });
  m.def("pin(int address, int nbytes) -> ()", [](int64_t address, int64_t nbytes) {
    Lock lock(mutex);
    blocks[reinterpret_cast<const char*>(address)] = {size_t(nbytes), true, HOST, {}, {}};
  });
  m.def("unpin(int address) -> ()", [](int64_t address) {
    Lock lock(mutex);
    blocks.erase(reinterpret_cast<const char*>(address));
  });
  // a kernel that torch does not dispatch (a collective) reads and writes these on the current stream
  m.def("touch(Tensor[] read, Tensor[] written, str by) -> ()", [](const std::vector<Tensor>& read, const std::vector<Tensor>& written, std::string by) {
    {
      Lock lock(mutex);
      launch(current);
      for (const auto& tensor : read) touch(tensor, false, current, by);
      for (const auto& tensor : written) touch(tensor, true, current, by);
    }
    tell();
  });
  m.def("touch_by_host(Tensor tensor) -> ()", [](const Tensor& tensor) {
    if (!tensor.is_cpu()) return;
    Lock lock(mutex);
    launch(HOST);
    touch(tensor, false, HOST, "native code");
  });
  m.def("races() -> str[]", [] {
    Lock lock(mutex);
    fresh.clear();
    return std::exchange(races, {});
  });
  m.def("watch_host() -> ()", [] { at::addGlobalCallback(at::RecordFunctionCallback(&host_operation).needsInputs(true).scopes({at::RecordScope::FUNCTION})); });
}

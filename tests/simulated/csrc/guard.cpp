// What torch asks a device for: which devices there are, their streams and events, pinned memory, resized storages.
#include "device.h"

#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace simulated {

namespace {

int index_or_current(c10::Device device) {
  return device.index() < 0 ? current_device() : device.index();
}
Stream* ours(const c10::Stream& stream) {
  return stream_by_id(stream.device_index(), stream.id());
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDevice;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return c10::Device(kDevice, c10::DeviceIndex(current_device()));
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < settings().devices, "simulated device: there is no ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device() = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return c10::DeviceIndex(settings().devices);
  }

  c10::Stream getStream(c10::Device device) const override {
    return as_torch(current_stream(index_or_current(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_torch(stream_by_id(index_or_current(device), 0));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return as_torch(new_stream(index_or_current(device), Kind::Side));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return as_torch(new_stream(index_or_current(device), Kind::Side));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = as_torch(current_stream(stream.device_index()));
    set_current_stream(ours(stream));
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return stream_is_over(ours(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(ours(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device() : device);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = simulated::record(ours(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait(ours(stream), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override {
    return !event || query(*static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(*static_cast<Event*>(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    auto *begin = static_cast<Event*>(first), *end = static_cast<Event*>(second);
    TORCH_CHECK(is_over(begin->at) && is_over(end->at), "simulated device: expected events that are over");
    return std::chrono::duration<double, std::milli>(*end->time - *begin->time).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    allocator().recordStream(memory, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return settings().devices > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override {
    return c10::DeviceIndex(settings().devices);
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    current_device() = device;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return c10::DeviceIndex(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    current_device() = device;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* memory) const override {
    return is_pinned(memory);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator();
  }
  // One generator for both: what a program draws is the same on the CPU and here.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(c10::Device(c10::kCPU));
  }
  at::Device getDeviceFromPtr(void* memory) const override {
    int device = device_of(memory);
    TORCH_CHECK(device >= 0, "simulated device: expected a device's memory");
    return c10::Device(kDevice, c10::DeviceIndex(device));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    int device = impl->device().index();
    auto fresh = allocate_on(bytes, device);
    if (size_t kept = std::min(bytes, impl->nbytes())) {
      auto *to = fresh.get(), *from = impl->mutable_data();
      auto target = reinterpret_cast<uintptr_t>(to), source = reinterpret_cast<uintptr_t>(from);
      auto copy = [=] { std::memcpy(to, from, kept); };
      enqueue(current_stream(device), "resize_", {{source, source + kept}}, {{target, target + kept}}, copy);
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
  }
};

} // namespace

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

} // namespace simulated

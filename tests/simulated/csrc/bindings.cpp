// What Python sees of the device besides torch's own ways to it.
#include "device.h"

#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <thread>

namespace py = pybind11;

namespace simulated {

c10::intrusive_ptr<c10d::Backend> make_communicator(
    const c10::intrusive_ptr<c10d::Backend>&,
    int rank,
    int size,
    const std::string& label);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  register_hooks();
  module.def("device_count", [] { return settings().devices; });
  module.def("current_device", [] { return current_device(); });
  module.def("set_device", [](int device) { current_device() = device; });

  module.def("seed", [](uint64_t number) {
    Lock lock(mutex());
    seed(number);
  });
  module.def("set_lag", [](const std::string& which, double microseconds) {
    Lock lock(mutex());
    settings().lag = which;
    settings().lag_us = microseconds;
  });
  module.def("set_reuse_at_once", [](bool at_once) { settings().reuse_at_once = at_once; });
  module.def("set_waits_raise", [](bool raise) { settings().waits_raise = raise; });

  module.def("sleep", [](double seconds) {
    auto rest = [=] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); };
    enqueue(current_stream(current_device()), "sleep", {}, {}, rest);
  });
  module.def("finish_all", &finish_all, py::call_guard<py::gil_scoped_release>());

  module.def("unordered_accesses", &unordered_accesses, py::call_guard<py::gil_scoped_release>());
  module.def("host_wait_count", &host_wait_count);
  module.def("host_waits", &host_waits, py::arg("first") = 0, py::call_guard<py::gil_scoped_release>());
  module.def("clear_reports", &clear_reports);
  module.def("operators_not_queued", &operators_not_queued);
  module.def("counts", [] {
    Lock lock(mutex());
    auto& now = counts();
    return std::map<std::string, uint64_t>{
        {"events", now.events},
        {"stream waits", now.waits},
        {"record_stream", now.record_streams},
        {"allocations", now.allocations}};
  });

  module.def("make_communicator", &make_communicator);
  module.def("started_collectives", [] {
    std::vector<std::tuple<std::string, std::string, int64_t, std::string>> made;
    for (auto& one : started_collectives()) made.emplace_back(one.group, one.name, one.numel, one.dtype);
    return made;
  });
  module.def("clear_started_collectives", &clear_started_collectives);
}

} // namespace simulated

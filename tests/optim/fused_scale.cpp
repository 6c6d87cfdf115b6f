// A function of two tensors, read as C++ extensions read them: without Python's leave.
// Made without torch/extension.h, which takes half a minute to compile.
#include <Python.h>

#include <ATen/core/TensorBody.h>

struct Variable {  // as THPVariable in torch/csrc/autograd/python_variable.h begins
  PyObject_HEAD
  at::Tensor tensor;
};

PyObject* THPVariable_Wrap(const at::TensorBase&);

static PyObject* scale(PyObject*, PyObject* args) {
  PyObject *weight, *input;
  if (!PyArg_ParseTuple(args, "OO", &weight, &input)) {
    return nullptr;
  }
  return THPVariable_Wrap(
      reinterpret_cast<Variable*>(weight)->tensor.mul(reinterpret_cast<Variable*>(input)->tensor));
}

static PyMethodDef methods[] = {{"scale", scale, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fused_scale", nullptr, -1, methods};

PyMODINIT_FUNC PyInit_fused_scale() {
  return PyModule_Create(&definition);
}

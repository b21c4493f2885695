export { render, hydrate } from "./render.js";
export {
	createElement,
	createElement as h,
	Fragment,
	createRef,
	cloneElement,
	isValidElement
} from "./create-element.js";
export { BaseComponent as Component } from "./component.js";
export { createContext } from "./create-context.js";
export { createPortal } from "./create-portal.js";
export { toChildArray } from "./diff/children.js";
export { default as options } from "./options.js";
